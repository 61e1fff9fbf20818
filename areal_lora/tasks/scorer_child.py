"""The scorer process: reads batches of answers on stdin, writes one verdict per answer on stdout.

Started by :mod:`areal_lora.tasks.scorer` as ``python -I -m areal_lora.tasks.scorer_child``. A
frame is a 4-byte big-endian length and a msgpack message. The first frame in is a
:class:`Setup`, answered by a :class:`Verdict` of value 0; every further frame is a list of
:class:`ScoreItem`, answered by one :class:`Verdict` per item, each written as soon as it is known.

The parent kills this process when an answer takes too long. The limits set here are for what
the parent cannot do: memory, core files, and an end of its own should the parent be gone.
"""

from __future__ import annotations

import importlib.util
import math
import os
import resource
import signal
from typing import BinaryIO

import msgspec

from areal_lora.tasks.rewards import REWARDS, RewardFunction


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """``function`` is ``FILE.py:NAME``; if it is given, it is used instead of the kind ``kind``."""

    kind: str
    function: str | None
    timeout_s: float
    memory_bytes: int


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One completion and the gold answer that it is compared with."""

    completion: str
    gold: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``value`` is the reward; None if it could not be computed, for the reason in ``detail``."""

    value: float | None
    detail: str = ""


def write_frame(stream: BinaryIO, message: object) -> None:
    stream.write(pack_frame(message))
    stream.flush()


def pack_frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message, or None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return stream.read(int.from_bytes(head, "big"))


def judge(reward: RewardFunction, item: ScoreItem) -> Verdict:
    try:
        value = float(reward(item.completion, item.gold))
    except Exception as error:  # fault boundary: a reward function may fail in any way on a model's text
        return Verdict(value=None, detail=f"{type(error).__name__}: {error}"[:500])
    if not math.isfinite(value):
        return Verdict(value=None, detail=f"the reward is {value}, not a finite number")
    return Verdict(value=value)


def reward_function(setup: Setup) -> RewardFunction:
    """The named reward; KeyError, OSError or AttributeError end the process before it is ready."""
    if setup.function is None:
        return REWARDS[setup.kind]
    path, _, name = setup.function.rpartition(":")
    spec = importlib.util.spec_from_file_location("reward_file", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[name]


def renew_limits(timeout_s: float) -> None:
    """Time for one more answer, with a margin so that the parent's deadline comes first."""
    grace_s = 2 * timeout_s + 2
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(used.ru_utime + used.ru_stime + grace_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_REAL, grace_s)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a reward function prints must not end up between the frames
    first = read_frame(requests)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    reward = reward_function(setup)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    write_frame(replies, Verdict(value=0.0))
    decoder = msgspec.msgpack.Decoder(list[ScoreItem])
    while (frame := read_frame(requests)) is not None:
        for item in decoder.decode(frame):
            renew_limits(setup.timeout_s)
            write_frame(replies, judge(reward, item))
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()

"""Scorer process: read batches of answers on stdin, write one verdict per answer on stdout.

Started by :mod:`areal_lora.tasks.scorer` as ``python -I -m areal_lora.tasks.scorer_child``. A
frame is a 4-byte big-endian length and a msgpack message. The first frame in is a
:class:`Setup`, answered by a :class:`Ready`; every further frame is a list of
:class:`ScoreItem`, answered by one :class:`ScoreResult` per item, each written as soon as it is known.

A timer in this process ends it when an answer takes too long (:mod:`areal_lora.tasks.deadline`), because the parent
may be stalled. The parent kills the process if the timer does not. Before any user code runs, the process restricts
itself (:mod:`areal_lora.tasks.fence`). It limits its own memory.
"""

from __future__ import annotations

import io
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from areal_lora.errors import ArealLoraError
from areal_lora.tasks.deadline import Deadline
from areal_lora.tasks.fence import raise_fence
from areal_lora.tasks.rewards import RewardFunction, grade, reward_function

PRINTED_CHARACTERS = 2000


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First message. ``path`` is the function of kind ``function``, ``hidden`` a folder that must not be readable.

    ``memory_bytes`` is the address space beyond the size of the process after loading the function.
    ``correct_threshold`` is the configured one (see `rewards.grade`).
    """

    kind: str
    path: str | None
    correct_threshold: float | None
    timeout_s: float
    memory_bytes: int
    hidden: str | None
    parent_pid: int
    search_path: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Setup`. ``problem`` states why no reward function was loaded; ``exit_code`` classifies it.

    ``missing`` names the protections that this machine lacks.
    """

    problem: str = ""
    exit_code: int = 0
    missing: list[str] = []


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One completion with its gold answer."""

    completion: str
    gold: str


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on one item. ``value`` is the reward; None if it could not be computed, for the reason in ``detail``.

    ``correct`` is None if the task has no rule for it. ``index`` counts the answers of a batch. ``ended_s`` is
    ``time.monotonic``, which parent and child share. ``tainted``: this process must not score another answer.
    """

    index: int
    value: float | None
    ended_s: float
    correct: bool | None = None
    detail: str = ""
    printed: str = ""
    tainted: bool = False


class Printed(io.TextIOBase):
    """Replacement of stdout and stderr that keeps the first characters printed while an answer is scored."""

    def __init__(self) -> None:
        self._text = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._text += text[: PRINTED_CHARACTERS - len(self._text)]
        return len(text)

    def take(self) -> str:
        text, self._text = self._text, ""
        return text


def write_frame(stream: BinaryIO, message: object) -> None:
    stream.write(pack_frame(message))
    stream.flush()


def pack_frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next message; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return stream.read(int.from_bytes(head, "big"))


def judge(
    reward: RewardFunction, correct_threshold: float | None, index: int, item: ScoreItem, printed: Printed
) -> ScoreResult:
    before = threads()
    value: float | None = None
    correct: bool | None = None
    detail, tainted = "", False
    try:
        graded = grade(reward(item.completion, item.gold), correct_threshold)
        value, correct = graded.reward, graded.correct
    except Exception as error:  # fault boundary: a reward function may fail in any way on a model's text  # noqa: BLE001
        detail, tainted = describe(error), isinstance(error, MemoryError)
    if threads() - before:
        value, correct, detail, tainted = None, None, "a thread that it started is still running", True
    return ScoreResult(
        index=index,
        value=value,
        correct=correct,
        ended_s=time.monotonic(),
        detail=detail,
        printed=printed.take(),
        tainted=tainted,
    )


def describe(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # fault boundary: even the message of a user's exception is user code  # noqa: BLE001
        return type(error).__name__


def threads() -> set[int]:
    """Return the ids of threads that run Python code."""
    return set(sys._current_frames())


def load(setup: Setup) -> RewardFunction | Ready:
    sys.path += [folder for folder in setup.search_path if folder not in sys.path]
    try:
        return reward_function(setup.kind, setup.path)
    except ArealLoraError as error:
        return Ready(problem=str(error), exit_code=error.exit_code)


def limit_memory(extra_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def renew_cpu_limit(timeout_s: float) -> None:
    """Allow CPU time for one more answer, with a margin so that the timer of `Deadline` ends first."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(used.ru_utime + used.ru_stime + 2 * timeout_s + 2)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))


def take_over_standard_streams() -> tuple[BinaryIO, BinaryIO, Printed]:
    """Return ``(requests, replies, printed)``. User code gets an empty stdin and bounded output."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    printed = Printed()
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), printed, printed
    return requests, replies, printed


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    requests, replies, printed = take_over_standard_streams()
    first = read_frame(requests)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    missing = raise_fence(None if setup.hidden is None else Path(setup.hidden), setup.parent_pid)
    deadline = Deadline(setup.timeout_s)
    if not deadline.kept:
        missing.append("POSIX timers (an answer that hangs is found later, by the controller)")
    reward = load(setup)
    if isinstance(reward, Ready):
        write_frame(replies, reward)
        return
    limit_memory(setup.memory_bytes)
    write_frame(replies, Ready(missing=missing))
    printed.take()
    decoder = msgspec.msgpack.Decoder(list[ScoreItem])
    while (frame := read_frame(requests)) is not None:
        for index, item in enumerate(decoder.decode(frame)):
            renew_cpu_limit(setup.timeout_s)
            deadline.start()
            verdict = judge(reward, setup.correct_threshold, index, item, printed)
            deadline.stop()  # before writing, which waits for a parent that does not read
            write_frame(replies, verdict)


if __name__ == "__main__":
    main()

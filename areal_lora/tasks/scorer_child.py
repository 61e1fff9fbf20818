"""Scorer process: read batches of answers on stdin, write one verdict per answer on stdout.

Started by :mod:`areal_lora.tasks.scorer` as ``python -I -m areal_lora.tasks.scorer_child``. A
frame is a 4-byte big-endian length and a msgpack message. The first frame in is a
:class:`Setup`, answered by a :class:`Ready`; every further frame is a list of
:class:`ScoreItem`, answered by one :class:`ScoreResult` per item, each written as soon as it is known.

A timer in this process ends it when an answer takes too long (`sandbox.fence`), because the parent
may be stalled. The parent kills the process if the timer does not. Before any user code runs, the process restricts
itself (`sandbox.fence`). It limits its own memory.
"""

import asyncio
import contextlib
import io
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from areal_lora.errors import ArealLoraError, EnvironmentError_
from areal_lora.processes.startup import die_with_parent
from areal_lora.tasks.reward_calls import RewardCall, Score, ScoreItem, Style, cause_of, describe, trace
from areal_lora.tasks.rewards import grade, reward_call
from areal_lora.tasks.sandbox.fence import Deadline, Doors, count_threads, limit_processes, raise_fence
from areal_lora.tasks.sandbox.seccomp import ProcessPolicy
from areal_lora.types import Cause, Outcome

PRINTED_CHARACTERS = 2000
ASYNC_LATE_S = 0.5  # a coroutine's own time-out comes before the end of the process


class Setup(Doors, frozen=True, kw_only=True):
    """First message. ``path`` is the function of kind ``function``.

    ``memory_bytes`` is the address space beyond the size of the process after loading the function.
    ``settings`` are the keys of a judge, reward model or code reward, ``kept`` the folder of a judge's cache.
    An ``async`` reward has ``slots`` answers at a time, whose time starts then; None: all.
    An answer that takes more than ``cpu_s`` has reward 0: SIGXCPU ends the process, also within C.
    """

    kind: str
    path: str | None = None
    timeout_s: float
    cpu_s: float | None = None
    slots: int | None = None
    memory_bytes: int
    parent_pid: int
    search_path: tuple[str, ...]
    settings: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def is_served(self) -> bool:
        """Whether a model that others serve scores: no user code runs."""
        return self.kind in ("judge", "model")

    def patience_s(self, answers: int, style: Style) -> float:
        """For a batch whose results come together, else for one answer."""
        rounds = -(-answers // (self.slots or answers))
        return self.timeout_s * {Style.EACH: 1, Style.ASYNC: rounds, Style.BATCH: answers}[style]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Setup`. ``problem`` states why no reward function was loaded; ``exit_code`` classifies it.

    ``missing`` names the protections that this machine lacks. ``style`` is that of the reward's calls.
    """

    problem: str = ""
    exit_code: int = 0
    missing: list[str] = []
    style: Style = Style.EACH


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one item. ``index`` counts the answers of a batch.

    ``ended_s`` is ``time.monotonic``, which parent and child share. ``tainted``: this process must not score another
    answer. ``costs``: spent since the last result. ``trace`` is the traceback of what the reward raised.
    """

    index: int
    score: Score
    ended_s: float
    printed: str = ""
    tainted: bool = False
    costs: dict[str, float] = {}
    trace: str = ""


class CapturedOutput(io.TextIOBase):
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
        return text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent


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


@dataclass(slots=True)
class Judge:
    """Scores answers with one reward function, and writes a `ScoreResult` for each as soon as it is known."""

    call: RewardCall
    setup: Setup
    printed: CapturedOutput
    replies: BinaryIO
    deadline: Deadline
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)  # one loop: a client of an earlier batch still works

    def batch(self, items: Sequence[ScoreItem]) -> None:
        match self.call.style:
            case Style.EACH:
                for index, item in enumerate(items):
                    with self._limited(1):
                        before = threads()
                        verdict = self._verdict(index, _tried(self.call.one, item), before)
                    write_frame(self.replies, verdict)
                return
            case Style.ASYNC:
                values = self.runner.run(self._concurrently(items))
            case Style.BATCH:
                with self._limited(len(items)):
                    found = _tried(self.call.many, items)
                values = [found] * len(items) if isinstance(found, Exception) else found
        for index, value in enumerate(values):
            write_frame(self.replies, self._verdict(index, value, threads()))

    @contextlib.contextmanager
    def _limited(self, answers: int) -> Iterator[None]:
        """Allow the time of so many answers, with CPU time beyond the timer's."""
        patience_s = self.setup.patience_s(answers, self.call.style)
        renew_process_limit(self.setup)
        renew_cpu_limit(2 * patience_s + 2 if self.setup.cpu_s is None else self.setup.cpu_s)
        self.deadline.start(patience_s + (ASYNC_LATE_S if self.call.style is Style.ASYNC else 0.0))
        try:
            yield
        finally:
            self.deadline.stop()  # before writing, which waits for a parent that does not read

    async def _concurrently(self, items: Sequence[ScoreItem]) -> list[Any]:
        """Each answer has its own time-out; the kernel's deadline ends a function that blocks the event loop."""
        slots = asyncio.Semaphore(self.setup.slots or len(items))

        async def one(item: ScoreItem) -> Any:
            async with slots, asyncio.timeout(self.setup.timeout_s):
                return await self.call.one(item)

        with self._limited(len(items)):
            return await asyncio.gather(*map(one, items), return_exceptions=True)

    def _verdict(self, index: int, value: Any, before: set[int]) -> ScoreResult:
        """Of what the reward returned, or the exception that it raised; ``before``: the threads that it may leave."""
        tainted, raised = False, ""
        try:
            if isinstance(value, BaseException):
                raise value
            score = grade(value)
        except Exception as error:  # fault boundary: a reward function may fail in any way  # noqa: BLE001
            tainted = isinstance(error, MemoryError)
            if isinstance(error, TimeoutError) and self.call.style is Style.ASYNC:
                score = Score.fault(Outcome.TIMEOUT, too_long(self.setup.timeout_s))
            else:
                alone = not self.setup.network
                cause = Cause.OTHER if self.setup.is_served else cause_of(error, alone=alone)
                detail, applies = describe(error, self.call.function), value is not None
                score = Score.fault(Outcome.ERROR, detail, cause, applies=applies)
                raised = trace(error) if applies else ""
        if threads() - before:
            score, tainted = Score.fault(Outcome.ERROR, "a thread that it started is still running"), True
        return ScoreResult(
            index=index,
            score=score,
            ended_s=time.monotonic(),
            printed=self.printed.take(),
            tainted=tainted,
            costs=self.call.take_costs(),
            trace=raised,
        )


def too_long(timeout_s: float) -> str:
    return f"scoring took longer than {timeout_s:g} s"


def _tried(function: Callable[..., Any], argument: Any) -> Any:
    """The result, or the exception that was raised."""
    try:
        return function(argument)
    except Exception as error:  # fault boundary: a reward function may fail in any way  # noqa: BLE001
        return error


def threads() -> set[int]:
    """Return the ids of threads that run Python code."""
    return set(sys._current_frames())


def load(setup: Setup, missing: Sequence[str]) -> RewardCall:
    """Raises ConfigError, EnvironmentError_."""
    sys.path += [folder for folder in setup.search_path if folder not in sys.path]
    call = reward_call(setup.kind, path=setup.path, settings=setup.settings, kept=setup.kept, scratch=setup.scratch)
    if setup.kind == "code" and missing and setup.processes is ProcessPolicy.MANY:
        raise EnvironmentError_(f"reward code: this machine lacks {'; '.join(missing)}")
    return call


def limit_memory(extra_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def renew_process_limit(setup: Setup) -> None:
    """Limit what user code may start, from what runs now; a program of an answer has a limit of its own."""
    if setup.processes.several and setup.kind != "code":
        limit_processes(count_threads(), for_good=False)


def renew_cpu_limit(more_s: float) -> None:
    """Allow so much more CPU time, and up to a second: the kernel counts whole ones."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(used.ru_utime + used.ru_stime + more_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))


def take_over_standard_streams() -> tuple[BinaryIO, BinaryIO, CapturedOutput]:
    """Return ``(requests, replies, printed)``. User code gets an empty stdin and bounded output."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    printed = CapturedOutput()
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), printed, printed
    return requests, replies, printed


def keep_group(parent_pid: int) -> int:
    """Continue as a child of this process, and return its pid.

    This process stays behind and ends its whole group when the child or the parent ends: what a reward started may
    outlive neither. The group cannot be left, because seccomp refuses it.
    """
    own_pid = os.getpid()
    child = os.fork()
    if child == 0:
        return own_pid
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    die_with_parent(signal.SIGTERM)
    if os.getppid() == parent_pid:
        os.closerange(0, 64)  # the pipes are the child's
        os.waitpid(child, 0)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    requests, replies, printed = take_over_standard_streams()
    first = read_frame(requests)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    parent_pid = setup.parent_pid
    if setup.processes is ProcessPolicy.MANY:
        parent_pid = keep_group(parent_pid)
    missing = raise_fence(setup, parent_pid)
    deadline = Deadline()
    if not deadline.kept:
        missing.append("POSIX timers (an answer that hangs is found later, by the controller)")
    renew_process_limit(setup)
    try:
        reward = load(setup, missing)
    except ArealLoraError as error:
        write_frame(replies, Ready(problem=str(error), exit_code=error.exit_code))
        return
    limit_memory(setup.memory_bytes)
    write_frame(replies, Ready(missing=missing, style=reward.style))
    printed.take()
    judge = Judge(call=reward, setup=setup, printed=printed, replies=replies, deadline=deadline)
    decoder = msgspec.msgpack.Decoder(list[ScoreItem])
    while (frame := read_frame(requests)) is not None:
        judge.batch(decoder.decode(frame))


if __name__ == "__main__":
    main()

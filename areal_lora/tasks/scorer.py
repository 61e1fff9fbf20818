"""Scoring in killable child processes.

A :class:`ScorerPool` keeps ``workers`` children alive (see :mod:`areal_lora.tasks.scorer_child`).
An answer whose scoring hangs, crashes, runs out of memory, raises or gives no finite number is
an ``error`` or a ``timeout`` without a reward (NaN), never reward 0; its child is killed and a
fresh one scores the rest of the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from areal_lora.config.models import RewardConfig
from areal_lora.errors import EnvironmentError_, RolloutError
from areal_lora.tasks.scorer_child import ScoreItem, Setup, Verdict, pack_frame
from areal_lora.types import Outcome

__all__ = ["Score", "ScoreItem", "ScorerPool"]

MEMORY_BYTES = 1 << 30
START_DEADLINE_S = 60.0
_VERDICT = msgspec.msgpack.Decoder(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """``reward`` is NaN unless ``outcome`` is ``ok``; ``detail`` says why it is not."""

    reward: float
    outcome: Outcome
    detail: str = ""


class ScorerPool:
    """Scores answers in child processes; use it as ``async with``, or call :meth:`close`.

    ``function`` (``FILE.py:NAME``) replaces the configured reward and is for tests and
    extensions in code; it cannot be set by configuration. Children start when first needed.
    Concurrent calls of :meth:`score` share the children, one call per child at a time.
    """

    def __init__(self, reward: RewardConfig, *, function: str | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        self._setup = Setup(kind=reward.kind, function=function, timeout_s=reward.timeout_s, memory_bytes=memory_bytes)
        self._idle: asyncio.Queue[_Child | None] = asyncio.Queue()
        for _ in range(reward.workers):
            self._idle.put_nowait(None)
        self._children: set[_Child] = set()
        self._closed = False

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One score per item, in order. Raises RolloutError once closed, EnvironmentError_ if no
        child can be started."""
        scores: list[Score] = []
        child = await self._idle.get()
        try:
            while len(scores) < len(items):
                if child is None:
                    child = await self._start()
                scores += await child.score(items[len(scores) :])
                if self._closed:
                    raise RolloutError("scorer pool: closed while it was scoring")
                if scores[-1].outcome is not Outcome.OK:
                    faulty, child = child, None
                    await self._discard(faulty)
        except BaseException:
            # Replies to a call that was cut short must not be read by the next one.
            if child is not None:
                faulty, child = child, None
                await self._discard(faulty)
            raise
        finally:
            self._idle.put_nowait(child)
        return scores

    async def close(self) -> None:
        """Kills the children and waits for their end. Calls in progress raise RolloutError."""
        self._closed = True
        for child in tuple(self._children):
            await self._discard(child)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self) -> _Child:
        if self._closed:
            raise RolloutError("scorer pool: already closed")
        child = await _Child.spawn(self._setup.timeout_s)
        self._children.add(child)
        try:
            await child.set_up(self._setup)
        except BaseException:
            await self._discard(child)
            raise
        return child

    async def _discard(self, child: _Child) -> None:
        self._children.discard(child)
        await child.kill()


class _Child:
    """One scorer process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._timeout_s = process, timeout_s
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def spawn(cls, timeout_s: float) -> Self:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-m", "areal_lora.tasks.scorer_child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={"PATH": os.defpath},
        )  # fmt: skip
        return cls(process, timeout_s)

    async def set_up(self, setup: Setup) -> None:
        try:
            self._stdin.write(pack_frame(setup))
            await self._stdin.drain()
            async with asyncio.timeout(START_DEADLINE_S):
                await self._verdict()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise EnvironmentError_(
                f"scorer: a child process did not start ({type(error).__name__}); its own message is in this log"
            ) from error

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Scores up to and including the first fault; after a fault this child is of no use."""
        scores: list[Score] = []
        try:
            self._stdin.write(pack_frame(list(items)))
            await self._stdin.drain()
            for _ in items:
                async with asyncio.timeout(self._timeout_s):
                    verdict = await self._verdict()
                if verdict.value is None:
                    return [*scores, _fault(Outcome.ERROR, verdict.detail)]
                scores.append(Score(reward=verdict.value, outcome=Outcome.OK))
        except TimeoutError:
            scores.append(_fault(Outcome.TIMEOUT, f"scoring took longer than {self._timeout_s:g} s"))
        except (OSError, asyncio.IncompleteReadError):
            scores.append(_fault(Outcome.ERROR, f"scorer process ended with status {await self._process.wait()}"))
        return scores

    async def kill(self) -> None:
        """Kills and reaps the process; harmless when it has already ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it may end on its own between the two lines
                self._process.kill()
        self._stdin.close()
        await self._process.wait()

    async def _verdict(self) -> Verdict:
        size = int.from_bytes(await self._stdout.readexactly(4), "big")
        return _VERDICT.decode(await self._stdout.readexactly(size))


def _fault(outcome: Outcome, detail: str) -> Score:
    return Score(reward=math.nan, outcome=outcome, detail=detail)

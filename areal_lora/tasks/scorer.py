"""Score answers in killable child processes.

A :class:`ScorerPool` keeps ``workers`` children (see :mod:`areal_lora.tasks.scorer_child`).
If the reward of an answer hangs, crashes, runs out of memory, raises or returns no finite number, the
answer is an ``error`` or a ``timeout`` without a reward (NaN), never reward 0, except by `ScorerPool.unfinished`. If
the child is damaged, the pool kills it, and a new child scores the rest of the batch.

The child enforces the time limit of an answer and ends itself. The parent's limit is longer and counts only
while the parent's event loop runs, so a stalled event loop or a stopped parent never kills a child.

A :class:`RewardSum` has a pool for each reward of an adapter; the score of an answer is their weighted sum. The first
reward that applies states what is correct. An answer that one of them could not score is not scored: the first such
outcome is the answer's.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TypeVar

import msgspec

from areal_lora.config.sections.section import ServedModel
from areal_lora.config.sections.task import RewardConfig, labels
from areal_lora.errors import ConfigError, EnvironmentError_, RolloutError
from areal_lora.processes.loading import UserFile
from areal_lora.tasks.reward_calls import SHORT, Score, ScoreItem, Style, Traces
from areal_lora.tasks.sandbox.scratch import remove_abandoned, scratch_folder
from areal_lora.tasks.sandbox.seccomp import ProcessPolicy
from areal_lora.tasks.scorer_child import Ready, ScoreResult, Setup, pack_frame, too_long
from areal_lora.tasks.scorer_setup import in_a_box, setup_of
from areal_lora.types import Outcome

START_DEADLINE_S = 60.0
START_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # between tries to replace a child: memory or processes may be short
END_DEADLINE_S = 1.0
LATE_S = 1.0  # the parent's limit exceeds the child's by this time
LARGEST_REPLY_BYTES = 1 << 16
PRINTS_LOGGED = 20
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_READY = msgspec.msgpack.Decoder(Ready)
_RESULT = msgspec.msgpack.Decoder(ScoreResult)

T = TypeVar("T")

log = logging.getLogger(__name__)


class ScorerPool:
    """Score answers in child processes; use it with ``async with``, or call :meth:`close`.

    ``__aenter__`` starts the first child, so that a reward that cannot be loaded is reported at once; the
    other children start on demand. Concurrent calls of :meth:`score` share the children, one call
    per child at a time. Children cannot read the folder ``hidden`` (the run folder).
    """

    def __init__(self, reward: RewardConfig, *, hidden: Path | None = None) -> None:
        self.setup = setup_of(reward, None if hidden is None else hidden.absolute())
        self._file = UserFile(self.setup.path)
        self.key_env = reward.key_env if isinstance(reward, ServedModel) else None
        self._costs: dict[str, float] = {}
        self._idle: asyncio.Queue[_Child | None] = asyncio.Queue()
        for _ in range(reward.workers):
            self._idle.put_nowait(None)
        self._children: set[_Child] = set()
        self._closed = False
        self._prints = self._unfinished = 0
        self.traces = Traces()

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Return one score per item, in order.

        Raises RolloutError once closed; EnvironmentError_ if no child can be started; ConfigError if the
        reward function cannot be loaded.
        """
        scores: list[Score] = []
        child = await self._idle.get()
        try:
            while len(scores) < len(items):
                if child is None:
                    child = await self._patient_start(OSError, EnvironmentError_)
                scores += await child.score(items[len(scores) :])
                if self._closed:
                    raise RolloutError("scorer pool: closed while it was scoring")
                if child.spent:
                    hurt, child = child, None
                    await self._discard(hurt)
        except BaseException:
            # The next call must not read the replies to an interrupted call.
            if child is not None:
                hurt, child = child, None
                await self._discard(hurt)
            raise
        finally:
            self._idle.put_nowait(child)
        return scores

    def take_costs(self) -> dict[str, float]:
        """What the reward has spent since the last call, by name; empty for rewards without costs."""
        costs, self._costs = self._costs, {}
        return costs

    async def close(self) -> None:
        """Kill the children and wait for their end. Calls in progress raise RolloutError."""
        self._closed = True
        for child in tuple(self._children):
            await self._discard(child)

    async def __aenter__(self) -> Self:
        child = await self._idle.get()
        assert child is None
        await asyncio.to_thread(remove_abandoned)
        self._idle.put_nowait(await self._patient_start())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _patient_start(self, *passing: type[Exception]) -> "_Child":
        """A child; a start is tried again where the system is short of something, and after errors of ``passing``.

        Raises EnvironmentError_ after as many failed starts in a row as there are pauses.
        """
        for pause_s in START_PAUSES_S:
            try:
                return await self._start()
            except (OSError, EnvironmentError_) as error:
                if not isinstance(error, passing) and getattr(error, "errno", None) not in SHORT:
                    raise
                log.warning("a scorer process could not be started, next try in %g s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
        try:
            return await self._start()
        except OSError as error:
            raise EnvironmentError_(f"scorer: no process can be started: {error}") from error

    async def _start(self) -> "_Child":
        if self._closed:
            raise RolloutError("scorer pool: already closed")
        self._file.note_start(log)
        child = await _Child.spawn(self)
        self._children.add(child)
        try:
            if not self._closed:  # else it was closed before it knew this child
                _warn_of(tuple(await child.set_up()))
        except BaseException as error:
            await self._discard(child)
            if not (self._closed and isinstance(error, EnvironmentError_)):
                raise
        if self._closed:
            await self._discard(child)
            raise RolloutError("scorer pool: closed while a child was started")
        return child

    async def _discard(self, child: "_Child") -> None:
        self._children.discard(child)
        await child.kill()

    def note(self, verdict: ScoreResult) -> None:
        """Add up what the reward spent, and log what it printed and raised."""
        for name, value in verdict.costs.items():
            self._costs[name] = self._costs.get(name, 0.0) + value
        if verdict.trace:
            self.traces.log("the reward", verdict.score.detail, verdict.trace)
        if verdict.printed and self._prints < PRINTS_LOGGED:
            self._prints += 1
            last = " (no further output is logged)" if self._prints == PRINTS_LOGGED else ""
            log.info("the reward printed: %s%s", verdict.printed.rstrip(), last)

    def unfinished(self, cpu_s: float) -> Score:
        """Of an answer that has used up its CPU time: a property of the answer, which no new try changes."""
        self._unfinished += 1
        if self._unfinished.bit_count() == 1:  # the first, and whenever they have doubled
            reward, n = self.setup.kind, self._unfinished
            log.info("%s has not compared %d answers within %g CPU seconds each: reward 0", reward, n, cpu_s)
        return Score(reward=0.0, outcome=Outcome.OK, correct=False)


class _Child:
    """One scorer process and its two pipes. ``spent``: the process must be killed, not used again."""

    def __init__(self, process: Process, setup: Setup, pool: ScorerPool, stack: contextlib.ExitStack) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._setup, self._pool, self._stack = process, setup, pool, stack
        self._timeout_s = setup.timeout_s
        self._stdin, self._stdout = process.stdin, process.stdout
        self.spent = False
        self._style = Style.EACH

    @classmethod
    async def spawn(cls, pool: ScorerPool) -> Self:
        setup, key_env = pool.setup, pool.key_env
        names = ["LD_LIBRARY_PATH"]  # interpreters of environment modules start with it alone
        if setup.is_served:
            names += ["SSL_CERT_FILE", "SSL_CERT_DIR", *_PROXIES, *([key_env] if key_env else [])]
        elif setup.network:  # clients in the function read keys, proxies and certificates there
            names = [name for name in os.environ if not name.startswith("AREAL_LORA")]
        environment = {"PATH": os.defpath} | {name: os.environ[name] for name in names if name in os.environ}
        argv = [sys.executable, "-I", "-m", "areal_lora.tasks.scorer_child"]
        with contextlib.ExitStack() as stack:
            if setup.scratch_bytes and not setup.is_served:
                scratch = str(stack.enter_context(scratch_folder()))
                setup = msgspec.structs.replace(setup, scratch=scratch)
                environment |= {"TMPDIR": scratch, "HOME": scratch}
            if setup.processes is not ProcessPolicy.NONE:
                argv, setup = await asyncio.to_thread(in_a_box, argv, setup)
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            return cls(process, setup, pool, stack.pop_all())

    async def set_up(self) -> list[str]:
        """Load the reward in the child; return the missing protections. Raises ConfigError, EnvironmentError_."""
        setup = self._setup
        reward = setup.path or setup.kind
        try:
            self._stdin.write(pack_frame(setup))
            await _patient(self._stdin.drain(), START_DEADLINE_S)
            ready = _READY.decode(await _patient(self._reply(), START_DEADLINE_S))
        except TimeoutError as error:
            raise EnvironmentError_(
                f"scorer: loading the reward {reward} takes longer than {START_DEADLINE_S:g} s"
            ) from error
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise EnvironmentError_(
                f"scorer: a child process {await self._end()} while it loaded the reward {reward}"
            ) from error
        if ready.problem and ready.exit_code == ConfigError.exit_code:
            raise ConfigError("reward", ready.problem)
        if ready.problem:
            raise EnvironmentError_(ready.problem)
        self._style = ready.style
        return ready.missing

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Return the scores of all items, or of those up to the one after which this child is spent."""
        scores: list[Score] = []
        patience_s = self._setup.patience_s(len(items), self._style) + LATE_S
        began_s = time.monotonic()
        try:
            self._stdin.write(pack_frame(list(items)))
            await _patient(self._stdin.drain(), patience_s)
            for index in range(len(items)):
                verdict = _RESULT.decode(await _patient(self._reply(), patience_s))
                if verdict.index != index:
                    raise msgspec.DecodeError(f"verdict {verdict.index} in place of {index}")
                self._pool.note(verdict)
                scores.append(verdict.score)
                if verdict.tainted:
                    self.spent = True
                    return scores
                began_s = verdict.ended_s
            return scores
        except TimeoutError:
            scores.append(Score.fault(Outcome.TIMEOUT, too_long(self._timeout_s)))
        except msgspec.DecodeError:
            scores.append(Score.fault(Outcome.ERROR, "the reward wrote into the scorer's reply pipe"))
        except (OSError, EOFError):
            scores.append(await self._ended(began_s))
        self.spent = True
        return scores

    async def _ended(self, began_s: float) -> Score:
        """Return the score of the answer that was in progress since ``began_s`` when the process ended."""
        how = await self._end()
        if self._setup.cpu_s is not None and self._process.returncode == -signal.SIGXCPU:
            return self._pool.unfinished(self._setup.cpu_s)
        # The deadline's, and that of CPU time; inside bubblewrap they are exit statuses.
        limits = (-signal.SIGKILL, -signal.SIGXCPU, 128 + signal.SIGKILL, 128 + signal.SIGXCPU)
        if self._process.returncode in limits and time.monotonic() - began_s >= self._timeout_s:
            return Score.fault(Outcome.TIMEOUT, too_long(self._timeout_s))
        return Score.fault(Outcome.ERROR, f"scorer process {how}")

    async def _end(self) -> str:
        """Describe how the process ended after the end of its pipe; it may have closed the pipe and still run."""
        try:
            return f"ended with status {await _patient(self._process.wait(), END_DEADLINE_S)}"
        except TimeoutError:
            return "closed its pipes"

    async def kill(self) -> None:
        """Kill and reap the process and its group. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # the process may end after the check
                os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        await self._process.wait()
        self._stack.close()

    async def _reply(self) -> bytes:
        """Read one reply. Raises EOFError (IncompleteReadError) at the end of the pipe, DecodeError if malformed."""
        size = int.from_bytes(await self._stdout.readexactly(4), "big")
        if size > LARGEST_REPLY_BYTES:
            raise msgspec.DecodeError(f"a reply of {size} bytes")
        return await self._stdout.readexactly(size)


async def _patient(work: Coroutine[Any, Any, T], patience_s: float) -> T:
    """Return the result of ``work``. Raises TimeoutError only if the event loop could receive it for ``patience_s``.

    After a stall of the event loop the timeout and the result arrive together. Therefore the result is checked once
    more after ``LATE_S``.
    """
    task = asyncio.ensure_future(work)
    try:
        for remaining_s in (patience_s, LATE_S):
            if (await asyncio.wait({task}, timeout=remaining_s))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


@cache
def _warn_of(missing: tuple[str, ...]) -> None:
    if missing:
        log.warning(
            "scorer processes have fewer protections than they should, this machine lacks: %s", "; ".join(missing)
        )


class RewardSum:
    """Scores answers with all ``rewards``, with weight 1 if there are no ``weights``; use it as a `ScorerPool`."""

    def __init__(self, rewards: Sequence[RewardConfig], weights: Sequence[float], hidden: Path | None = None) -> None:
        self._labels = labels(list(rewards))
        self._kinds = [reward.kind for reward in rewards]
        self._weights = weights or [1.0] * len(rewards)
        self._pools = [ScorerPool(reward, hidden=hidden) for reward in rewards]
        self._stack = contextlib.AsyncExitStack()
        self._seconds: list[float] = []

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Return one score per item, in order. Raises what `ScorerPool.score` raises."""
        start_s = time.monotonic()
        columns = await asyncio.gather(*(pool.score(items) for pool in self._pools))
        self._seconds.append(time.monotonic() - start_s)
        return [weighted(scores, self._labels, self._weights) for scores in zip(*columns, strict=True)]

    def take_costs(self) -> dict[str, float]:
        """What the rewards have spent since the last call: ``judge/calls``, ``judge/cached_share``.

        ``seconds`` is the mean time of a call of `score`, if there was one.
        """
        found = {"seconds": fmean(self._seconds)} if self._seconds else {}
        self._seconds.clear()
        for label, kind, pool in zip(self._labels, self._kinds, self._pools, strict=True):
            costs = pool.take_costs()
            if answers := costs.get("answers"):
                costs["cached_share"] = costs.pop("cached", 0.0) / answers
            found |= {f"{label or kind}/{name}": value for name, value in costs.items()}
        return found

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            for pool in self._pools:
                await stack.enter_async_context(pool)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()


def weighted(scores: Sequence[Score], names: Sequence[str], weights: Sequence[float]) -> Score:
    """The sum of one answer's ``scores``. The value of a named reward is a part, unweighted, and so are its parts.

    Rewards that do not apply to the answer do not count, unless none applies.
    """
    every = list(zip(names, scores, weights, strict=True))
    applying = [each for each in every if each[1].applies] or every
    for name, score, _ in applying:
        if score.outcome is not Outcome.OK:
            detail = f"{name}: {score.detail}" if name else score.detail
            return Score.fault(score.outcome, detail, score.cause)
    parts: dict[str, float] = {}
    for name, score, _ in applying:
        own = {name: score.reward} if name else {}
        parts |= own | {f"{name}/{part}" if name else part: value for part, value in score.components.items()}
    return Score(
        reward=sum(weight * score.reward for _, score, weight in applying),
        outcome=Outcome.OK,
        correct=applying[0][1].correct,
        components=parts,
    )

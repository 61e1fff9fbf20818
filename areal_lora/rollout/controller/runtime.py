"""Everything that belongs to one adapter in the controller, and the work of one of its groups."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from areal_lora.data.prompts import Prompt
from areal_lora.errors import ArealLoraError, EnvironmentError_, ExitCode
from areal_lora.processes.startup import get_logger
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.completion_client import GenerationFault
from areal_lora.rollout.controller.evaluation import Evaluator
from areal_lora.rollout.controller.feed import NO_VERSION, AdapterFeed
from areal_lora.rollout.controller.groups import GroupTally, Ticket
from areal_lora.rollout.controller.pacing import Claim
from areal_lora.rollout.controller.retries import generation_failure, scoring_failure
from areal_lora.rollout.routing import server_observer
from areal_lora.rollout.workflow import Workflow, first_fault

NO_VERSION_WAIT_S = 0.2

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What servers take at once: ``sequences`` each; a group has ``n_samples``."""

    sequences: int
    n_samples: int

    def groups(self, servers: int) -> int:
        """Groups of one adapter that may run at once while no other adapter wants a place."""
        return max(1, math.ceil(servers * self.sequences / self.n_samples))

    def evaluated(self, servers: int) -> int:
        """Sequences that the evaluations of all adapters may have at once: the other half is for training rollouts."""
        return servers * self.sequences // 2


class Changes:
    """Something that callers wait for has changed, in any adapter."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all callers."""
        self._event.set()
        self._event = asyncio.Event()

    async def next(self) -> None:
        """Return at the next change."""
        await self._event.wait()

    async def wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when ``ready()``, checked at every change, or after ``timeout_s``."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not ready():
            remaining_s = deadline - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                return
            try:
                async with asyncio.timeout(remaining_s):
                    await self._event.wait()
            except TimeoutError:
                return


@dataclass(slots=True, kw_only=True)
class AdapterRuntime:
    """One adapter: its feed, its workflow, one task per running group, and results not yet fetched.

    ``capacity`` follows the servers that the trainer announces.
    ``one_evaluation``: an evaluation holds its version on the servers, which have room for one of each adapter beside
    those that are rolled out. ``seed`` is the adapter's. ``take_costs`` returns what the rewards spent since its last
    call. ``failure`` says why its rollouts have ended, None while they have not. While ``paused`` no group is issued.
    """

    feed: AdapterFeed
    workflow: Workflow
    evaluator: Evaluator
    seed: int
    capacity: Capacity
    events: list[m.EvalResult] = field(default_factory=list)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    one_evaluation: asyncio.Lock = field(default_factory=asyncio.Lock)
    failure: m.AdapterFailed | None = None
    paused: bool = False
    take_costs: Callable[[], dict[str, float]] = dict

    def resize(self, servers: int) -> None:
        """Run as much at once as ``servers`` servers take. Groups that run already are not cut off."""
        self.feed.max_running = self.capacity.groups(servers)
        self.evaluator.places.resize(self.capacity.evaluated(servers))

    def claim(self, weight: float) -> Claim:
        """Its part of the servers while several adapters want more than there is."""
        return Claim(sequences=self.capacity.n_samples, groups=self.feed.budget.prompts_per_step, weight=weight)

    def hello(self, version: int, *, trainer: str, snapshot: bytes) -> None:
        """A trainer begins at ``version``; what an earlier one made of the adapter is forgotten."""
        self.failure = None
        self.feed.hello(version, trainer=trainer, snapshot=snapshot)
        self.events.clear()

    def fail(self, error: Exception) -> None:
        """End the rollouts; the trainer hears of it when it asks for the next batch."""
        reason, code = f"{type(error).__name__}: {error}", int(ExitCode.TEMPORARY)
        if isinstance(error, ArealLoraError):
            reason, code = str(error), error.exit_code
        if isinstance(error, EnvironmentError_):  # a scorer process that was not started may be, the next time
            code = ExitCode.TEMPORARY
        log.error("the rollouts of %s end: %s", self.feed.name, reason)
        self.failure = self.failure or m.AdapterFailed(adapter=self.feed.name, reason=reason, exit_code=code)
        self.feed.end()

    async def roll_out(self, ticket: Ticket) -> None:
        """Request one issued group until it is ready or dropped. Cancelled when the group has become too old."""
        feed = self.feed
        server_observer.set(partial(feed.served_by, ticket))
        back_off_s: float | None = 0.0
        while back_off_s is not None:
            await asyncio.sleep(back_off_s)
            ref = feed.begin(ticket)
            if ref is None:
                back_off_s = NO_VERSION_WAIT_S
                continue
            try:
                seed = request_seed(self.seed, ticket.prompt, ticket.issue, ticket.resampled)
                episode = await self.workflow.run(ticket.prompt, ref, seed)
            except GenerationFault as fault:
                back_off_s = feed.retry(ticket, generation_failure(fault))
                continue
            bad = first_fault(episode.group)
            if bad is not None:
                back_off_s = feed.retry(ticket, scoring_failure(bad))
                continue
            feed.finish(ticket, episode)
            back_off_s = None

    def expire(self, ticket: Ticket) -> None:
        """Cancel the request of ``ticket``, if it has not ended without a report."""
        task = self.tasks.get(ticket.seq)
        if task is not None:
            task.cancel()

    def drain_events(self) -> tuple[m.EvalResult, ...]:
        events = tuple(self.events)
        self.events.clear()
        return events


@dataclass(frozen=True, slots=True)
class Rolling:
    """An adapter's runtime as the admission sees it; ``start`` begins the task of a group."""

    runtime: AdapterRuntime
    start: Callable[[AdapterRuntime, Ticket], None]

    @property
    def running(self) -> int:
        return len(self.runtime.feed.groups.running)

    @property
    def tally(self) -> GroupTally:
        return self.runtime.feed.groups.tally

    @property
    def idle(self) -> bool:
        return self._off or self.runtime.feed.newest == NO_VERSION

    @property
    def _off(self) -> bool:
        """A version may be announced after the rollouts have failed: no group of it is issued."""
        return self.runtime.paused or self.runtime.failure is not None

    def start_one(self) -> bool:
        ticket = None if self._off else self.runtime.feed.admit()
        if ticket is not None:
            self.start(self.runtime, ticket)
        return ticket is not None


def request_seed(run_seed: int, prompt: Prompt, issue: int, resampled: int) -> int:
    """31-bit sampling seed of one request: the same run asks the same question with the same seed.

    A try that failed for lack of a server, or in a crash, does not change the seed.
    """
    text = f"{run_seed}:{prompt.uid}:{issue}:{resampled}".encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") >> 1

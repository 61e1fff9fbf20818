"""Everything that belongs to one adapter in the controller, and the work of one of its groups.

Which adapter's group starts next: one fair queue over the sequences that the servers take at once.

Every adapter may use all places that no other one wants. While several want one, it goes to the adapter with the
smallest virtual time: the trained tokens of its groups per unit of weight (`areal_lora.algorithms.fair_queue`), so that
tokens follow the weights whatever the number of places and the length of answers. A group in flight counts with an
estimate, the recent mean of its adapter, until its tokens are known. Groups in flight are never cut off for another
adapter: places come free as groups end.
"""

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.errors import ArealLoraError, EnvironmentError_, ExitCode
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.evaluation import Evaluator
from areal_lora.rollout.controller.feed import NO_VERSION, AdapterFeed
from areal_lora.rollout.controller.groups import Ticket
from areal_lora.rollout.workflow import Episode, Workflow, derived_seed, first_fault

NO_VERSION_WAIT_S = 0.2
RECENT = 16  # answered groups whose mean is the estimate
LEAST_FILL = 0.25  # servers have at most four times what they sample at once

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Capacity:
    """What servers take at once: ``sequences`` each; a group has ``n_samples``.

    Its places come free one by one until its longest answer has ended: it counts ``fill`` of them, the share that
    recent groups had on average. For a time there may be more sequences than places: they wait on the servers.
    """

    sequences: int
    n_samples: int
    fill: float = 1.0

    def answered(self, lengths: Sequence[int]) -> None:
        """A group has ended with answers of ``lengths`` tokens."""
        share = sum(lengths) / max(1, len(lengths) * max(lengths))
        self.fill += (max(LEAST_FILL, share) - self.fill) / RECENT

    @property
    def places(self) -> float:
        """Those of a group, on average while it runs."""
        return self.n_samples * self.fill

    def groups(self, servers: int) -> int:
        """Groups of one adapter that may run at once while no other adapter wants a place."""
        return max(1, math.ceil(servers * self.sequences / self.places))

    def evaluated(self, servers: int) -> int:
        """Sequences that an evaluation may have at once: the other half is for training rollouts."""
        return servers * self.sequences // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One adapter in the queue: a group has ``sequences``, a step ``groups``; ``weight`` is its part."""

    sequences: int
    groups: int
    weight: float


@dataclass(slots=True, kw_only=True)
class AdapterRuntime:
    """One adapter: its feed, its workflow, one task per running group, and results not yet fetched.

    ``start``, the controller's, creates the task of a group; ``served`` is whether a server holds a version of the
    adapter of a name. ``tasks`` are by seq; the feed cancels those whose answers
    are not needed any more. ``close`` ends the scorers of one that joins. ``seed`` is the adapter's. ``take_costs``
    returns what the rewards spent since its last call. ``failure`` is why its rollouts have ended, None while they
    have not. While ``paused`` no group is issued. Batches have texts if ``texts``. ``lengths`` are those of a group's
    answers for its ``capacity``; without it no request has to wait on a server.
    """

    feed: AdapterFeed
    tasks: dict[int, asyncio.Task[None]]
    workflow: Workflow
    evaluator: Evaluator
    seed: int
    capacity: Capacity
    weight: float
    events: list[m.EvalResult] = field(default_factory=list)
    failure: m.AdapterFailed | None = None
    paused: bool = False
    texts: bool = True
    lengths: Callable[[Episode], Sequence[int]] | None = None
    take_costs: Callable[[], dict[str, float]] = dict
    close: Callable[[], Awaitable[None]] = field(init=False)
    start: "Callable[[AdapterRuntime, Ticket], None]" = field(init=False)
    served: Callable[[str], bool] = field(init=False)

    def resize(self, servers: int) -> None:
        """Run as much at once as ``servers`` servers take. Groups that run already are not cut off."""
        self.feed.max_running = self.capacity.groups(servers)
        self.evaluator.places.resize(self.capacity.evaluated(servers))

    @property
    def claim(self) -> Claim:
        """Its part of the servers while several adapters want more than there is."""
        return Claim(sequences=self.capacity.n_samples, groups=self.feed.budget.prompts_per_step, weight=self.weight)

    @property
    def running(self) -> int:
        return len(self.feed.groups.running)

    @property
    def places(self) -> float:
        return self.capacity.places

    @property
    def ended(self) -> list[int | None]:
        """Of each group that is not in flight any more the tokens to train on; the admission empties it."""
        return self.feed.groups.ended

    @property
    def off(self) -> bool:
        """A version may be announced after the rollouts have failed: no group of it is issued."""
        return self.paused or self.failure is not None

    @property
    def idle(self) -> bool:
        """Whether it wants no group at all; not one that may not yet start a group."""
        return self.off or self.feed.newest == NO_VERSION

    def start_one(self) -> bool:
        """Start a group; False where pacing or the staleness budget allow none."""
        ticket = None if self.off else self.feed.admit()
        if ticket is not None:
            self.start(self, ticket)
        return ticket is not None

    def hello(self, version: int, *, trainer: str, snapshot: bytes) -> None:
        """A trainer starts at ``version``; failure and results of an earlier session are forgotten."""
        self.failure = None
        self.feed.hello(version, trainer=trainer, snapshot=snapshot)
        self.events.clear()

    def fail(self, error: Exception) -> None:
        """End the rollouts; the trainer gets the reason with its next request for a batch."""
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
        feed, retired = self.feed, False
        back_off_s: float | None = 0.0
        while back_off_s is not None:
            await asyncio.sleep(back_off_s)
            # Each try of an episode starts its environments again.
            ref = feed.begin(ticket) if not retired or self.served(feed.name) else None
            if ref is None:
                back_off_s = NO_VERSION_WAIT_S
                continue
            episode = None
            try:
                # A try that failed for lack of a server, or in a crash, does not change the seed.
                seed = derived_seed(self.seed, ticket.prompt.uid, ticket.issue, ticket.resampled)
                episode = await self.workflow.run(ticket.prompt, ref, seed)
                if (bad := first_fault(episode.group)) is not None:
                    raise GenerationFault(FaultKind.SCORER, f"{bad.outcome}: {bad.detail}", bad.cause)
            except GenerationFault as fault:
                back_off_s = feed.retry(ticket, fault, episode)
                retired = fault.kind is FaultKind.RETIRED
            else:
                if self.lengths is not None:
                    self.capacity.answered(self.lengths(episode))
                feed.finish(ticket, episode)
                return


class Admission(FairQueue):
    """Starts groups of ``adapters`` while there is room for ``sequences`` at once on all servers together.

    The time of an adapter has its groups in flight, with their estimates.
    """

    def __init__(self, adapters: Mapping[str, AdapterRuntime]) -> None:
        super().__init__({name: adapter.claim.weight for name, adapter in adapters.items()})
        self.sequences = 0
        self._accounts = {name: Account(adapter) for name, adapter in adapters.items()}

    def add(self, name: str, adapter: AdapterRuntime) -> None:
        self._settle()
        self.join(name, adapter.claim.weight)
        self._accounts[name] = Account(adapter)

    def leave(self, name: str) -> None:
        super().leave(name)
        del self._accounts[name]

    def time(self, name: str) -> float:
        return super().time(name) + self.cost(name, self._accounts[name].in_flight)

    def admit(self) -> None:
        """Start groups until no adapter has one, or no place remains."""
        self._settle()
        taken, waiting = sum(account.places for account in self._accounts.values()), list[str]()
        candidates = [(self.time(name), place, name) for place, name in enumerate(self._accounts)]
        heapq.heapify(candidates)
        while candidates and taken < self.sequences:
            start, place, first = candidates[0]
            account = self._accounts[first]
            taken -= account.places
            started = account.adapter.start_one()
            taken += account.places
            if not started:
                heapq.heappop(candidates)
                waiting.append(first)
                continue
            heapq.heapreplace(candidates, (self.time(first), place, first))
            for name in waiting:  # they have left a place to another adapter; an idle one misses nothing
                account = self._accounts[name]
                self.catch_up(name, start, 0.0 if account.adapter.idle else account.claim.groups * account.estimate)

    def _settle(self) -> None:
        known = [a.estimate / a.claim.sequences for a in self._accounts.values() if a.answered]
        length = sum(known) / len(known) if known else 1.0
        for name, account in self._accounts.items():
            self.charge(name, account.settle(length))


@dataclass(slots=True)
class Account:
    """Groups of one adapter. ``estimate`` is what a group in flight counts, in tokens."""

    adapter: AdapterRuntime
    claim: Claim = field(init=False)
    estimate: float = field(init=False)
    answered: int = 0

    def __post_init__(self) -> None:
        self.claim = self.adapter.claim
        self.estimate = float(self.claim.sequences)

    @property
    def places(self) -> float:
        """Those of the groups in flight."""
        return self.adapter.places * self.adapter.running

    @property
    def in_flight(self) -> float:
        """Tokens of the groups in flight."""
        return self.adapter.running * self.estimate

    def settle(self, length: float) -> float:
        """Tokens of the groups that have ended since the last call; ``length`` is the mean of all adapters' answers.

        A group without an answer counts with the estimate: it had its place, too.
        """
        ended = len(self.adapter.ended)
        answers = [tokens for tokens in self.adapter.ended if tokens is not None]
        self.adapter.ended.clear()
        # A group counts at least one token, or one whose groups have none would have all places.
        answered, tokens = len(answers), max(sum(answers), len(answers))
        if answered:
            self.answered += answered
            self.estimate += (tokens / answered - self.estimate) * min(1.0, answered / min(self.answered, RECENT))
        elif not self.answered:
            self.estimate = self.claim.sequences * length
        return tokens + (ended - answered) * self.estimate

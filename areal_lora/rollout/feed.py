"""The book-keeping of one adapter: which groups are issued, which are ready, which are handed over.

Pure and synchronous: no sockets, no tasks, a clock that is passed in. The controller drives it
from real requests, the property test from a simulation.

    prompts -> admit -> begin -> finish -> take -> commit
                 ^        ^ retry |           |
                 |________________|___________|  dropped as stale: the prompt is issued again
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from areal_lora.errors import RolloutError, StalenessError
from areal_lora.rollout.ledger import GroupState, Ledger
from areal_lora.rollout.messages import Stats
from areal_lora.rollout.prompts import Prompt, PromptStream
from areal_lora.rollout.staleness import StalenessBudget, Verdict
from areal_lora.rollout.workflow import Episode
from areal_lora.types import AdapterRef, TrajectoryGroup

MAX_TRIES = 8  # requests of one issue
MAX_ISSUES = 4  # issues of one prompt, when groups are dropped as stale
MIN_LOST_IN_A_ROW = 16
BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0
UNSERVED_WAIT_S, UNSERVED_S = 0.2, 300.0


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One issued group. ``version`` is None while it waits for a retry."""

    seq: int
    prompt: Prompt
    issue: int
    tries: int = 0
    version: int | None = None
    begun_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A scored group; ``oldest`` is the version of its oldest token."""

    ticket: Ticket
    episode: Episode
    oldest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The groups of one step, handed over and not yet known to be committed."""

    step: int
    version: int
    finished: tuple[Finished, ...]

    @property
    def groups(self) -> tuple[TrajectoryGroup, ...]:
        return tuple(finished.episode.group for finished in self.finished)


class AdapterFeed:
    """Admission, staleness and exactly-once of one adapter.

    ``on_expire(ticket)`` is called for a running group that can no longer be consumed; the
    caller abandons its request and must not report about that ticket again.
    """

    def __init__(
        self,
        name: str,
        *,
        budget: StalenessBudget,
        prompts: PromptStream,
        ledger: Ledger,
        max_running: int,
        on_expire: Callable[[Ticket], None],
        clock: Callable[[], float],
    ) -> None:
        self.name, self.budget, self.max_running = name, budget, max_running
        self.last_fault = ""
        self._prompts, self._ledger, self._on_expire, self._clock = prompts, ledger, on_expire, clock
        self._newest: int | None = None
        self._next_version = -1
        self._position: int | None = None
        self._again: deque[tuple[Prompt, int]] = deque()
        self._running: dict[int, Ticket] = {}
        self._ready: dict[int, Finished] = {}
        self._leases: dict[int, Lease] = {}
        self._retried: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._lost_in_a_row = 0
        self._unserved_since: float | None = None
        self._tokens = 0
        self._generation_s = 0.0
        self._idle_s = 0.0
        self._idle_since: float | None = None

    # ------------------------------------------------------------ versions

    def hello(self, version: int, *, resumed: bool) -> None:
        """A trainer consumes next at ``version``; nothing is issued until it announces one.

        ``resumed``: it has loaded that version, so earlier steps are consumed and later ones undone.
        """
        self._newest = None
        if resumed:
            self.commit(version - 1)
            for lease in self._leases.values():
                for finished in lease.finished:
                    self._ledger.unlease(finished.ticket.seq)
                    self._ready[finished.ticket.seq] = finished
            self._leases.clear()

    def announce(self, version: int) -> None:
        """``version`` is active on the servers; the first one after :meth:`hello` is the next to consume at."""
        if self._newest is None:
            self._consume_next_at(version)
            if self._position is None:
                # A resumed run goes on where the steps before it stopped reading prompts.
                self._position = version * self.budget.prompts_per_step
            self._idle_since = None if self._running else self._clock()
        elif version < self._newest:
            raise RolloutError(f"{self.name}@v{version} announced after v{self._newest}")
        self._newest = version

    def has_announced(self, version: int) -> bool:
        return self._newest is not None and self._newest >= version

    # ------------------------------------------------------------ issuing

    def admit(self) -> Ticket | None:
        """Issue the next group if budget and concurrency allow it."""
        if self._newest is None or self._position is None or len(self._running) >= self.max_running:
            return None
        live = len(self._running) + len(self._ready) + self._leased_for(self._next_version)
        if not self.budget.capacity(newest=self._newest, next_version=self._next_version, live=live):
            return None
        while True:
            if self._again:
                prompt, issue = self._again.popleft()
            else:
                prompt, issue = self._prompts.at(self._position), 1
                self._position += 1
            seq = self._ledger.issue(prompt.uid, prompt.position)
            if self._prompts.fits(prompt):
                break
            self._ledger.drop(seq, "prompt_too_long")
        ticket = Ticket(seq=seq, prompt=prompt, issue=issue)
        self._close_idle()
        self._running[seq] = ticket
        return ticket

    def begin(self, ticket: Ticket) -> AdapterRef | None:
        """The version to ask for now; None while no version is announced."""
        if self._newest is None:
            return None
        self._ledger.run(ticket.seq, self._newest)
        ticket.version = self._newest
        ticket.tries += 1
        ticket.begun_s = self._clock()
        return AdapterRef(name=self.name, version=self._newest)

    def finish(self, ticket: Ticket, episode: Episode) -> None:
        """All trajectories of the group are ``ok``; it is ready unless it came too late."""
        self._forget_running(ticket)
        self._ledger.finish(ticket.seq)
        self._lost_in_a_row, self._unserved_since = 0, None
        self._tokens += sum(sum(t.loss_mask) for t in episode.group.trajectories)
        self._generation_s += self._clock() - ticket.begun_s
        finished = Finished(ticket=ticket, episode=episode, oldest=episode.group.oldest_version)
        verdict = self.budget.verdict(oldest=finished.oldest, consume_version=self._next_version)
        if verdict is Verdict.FRESH:
            self._ready[ticket.seq] = finished
        else:
            self._drop_and_reissue(ticket, verdict)

    def retry(
        self, ticket: Ticket, kind: str, detail: str, *, retryable: bool = True, served: bool = True
    ) -> float | None:
        """Seconds to wait before the next :meth:`begin`, or None: the group is dropped for good.

        A request to a server that is gone (``served`` False) does not count, for ``UNSERVED_S``: the
        group waits for one to be (back) there. Raises RolloutError when two steps' worth of groups
        in a row were lost this way.
        """
        self.last_fault = f"{kind}: {detail}"
        if not served:
            if self._unserved_since is None:
                self._unserved_since = self._clock()
            served = self._clock() - self._unserved_since > UNSERVED_S
            ticket.tries -= not served
        if retryable and ticket.tries < MAX_TRIES:
            self._ledger.requeue(ticket.seq)
            ticket.version = None
            self._retried[kind] += 1
            return min(BACK_OFF_S * 2 ** max(ticket.tries - 1, 0), MAX_BACK_OFF_S) if served else UNSERVED_WAIT_S
        self._forget_running(ticket)
        self._ledger.drop(ticket.seq, kind)
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= max(MIN_LOST_IN_A_ROW, 2 * self.budget.prompts_per_step):
            raise RolloutError(
                f"{self.name}: {self._lost_in_a_row} groups in a row were dropped after failures; last: "
                f"{self.last_fault} (fix: see the rollout servers' logs)"
            )
        return None

    # ------------------------------------------------------------ handing over

    def take(self, step: int, version: int) -> Lease | None:
        """The groups of ``step``, or None while fewer than a batch are ready.

        A step that is not committed is served again unchanged. Raises StalenessError if a group
        beyond the budget would be handed over.
        """
        lease = self._leases.get(step)
        if lease is not None:
            self._assert_fresh(lease.finished, version)
            return lease
        if self._leases and step < max(self._leases):
            raise RolloutError(f"{self.name}: step {step} asked after step {max(self._leases)}")
        self._consume_next_at(version)
        needed = self.budget.prompts_per_step
        if len(self._ready) < needed:
            return None
        chosen = tuple(self._ready.pop(seq) for seq in sorted(self._ready)[:needed])
        self._assert_fresh(chosen, version)
        for finished in chosen:
            self._ledger.lease(finished.ticket.seq, step)
            self._staleness[version - finished.oldest] += 1
        lease = self._leases[step] = Lease(step=step, version=version, finished=chosen)
        self._consume_next_at(version + 1)
        self._ledger.check(len(self._running) + len(self._ready) + self._leased)
        return lease

    def commit(self, step: int) -> None:
        """``step`` and all steps before it are in a durable checkpoint. Idempotent."""
        for leased in [leased for leased in self._leases if leased <= step]:
            for finished in self._leases.pop(leased).finished:
                self._ledger.consume(finished.ticket.seq)

    def snapshot(self) -> bytes:
        return b""

    def _assert_fresh(self, chosen: tuple[Finished, ...], version: int) -> None:
        for finished in chosen:
            if self.budget.verdict(oldest=finished.oldest, consume_version=version) is not Verdict.FRESH:
                raise StalenessError(
                    f"group {finished.ticket.prompt.uid} has tokens of v{finished.oldest} and would be consumed at "
                    f"v{version}, max_staleness is {self.budget.max_staleness}"
                )

    def _consume_next_at(self, version: int) -> None:
        """Drop what cannot be consumed at ``version`` or later, and issue those prompts again."""
        if version == self._next_version:
            return
        self._next_version = version
        for finished in list(self._ready.values()):
            verdict = self.budget.verdict(oldest=finished.oldest, consume_version=version)
            if verdict is not Verdict.FRESH:
                del self._ready[finished.ticket.seq]
                self._drop_and_reissue(finished.ticket, verdict)
        for ticket in list(self._running.values()):
            if ticket.version is None:
                continue
            verdict = self.budget.verdict(oldest=ticket.version, consume_version=version)
            if verdict is not Verdict.FRESH:
                self._forget_running(ticket)
                self._drop_and_reissue(ticket, verdict)
                self._on_expire(ticket)

    def _drop_and_reissue(self, ticket: Ticket, verdict: Verdict) -> None:
        if ticket.issue < MAX_ISSUES:
            self._ledger.drop(ticket.seq, verdict)
            self._again.append((ticket.prompt, ticket.issue + 1))
        else:
            self._ledger.drop(ticket.seq, f"{verdict}_given_up")

    # ------------------------------------------------------------ counting

    def _leased_for(self, version: int) -> int:
        return sum(len(lease.finished) for lease in self._leases.values() if lease.version >= version)

    @property
    def _leased(self) -> int:
        return sum(len(lease.finished) for lease in self._leases.values())

    def _forget_running(self, ticket: Ticket) -> None:
        del self._running[ticket.seq]
        if not self._running:
            self._idle_since = self._clock()

    def _close_idle(self) -> None:
        if self._idle_since is not None:
            self._idle_s += self._clock() - self._idle_since
            self._idle_since = None

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def running(self) -> int:
        return len(self._running)

    def stats(self) -> Stats:
        counts = self._ledger.counts()
        idle_now = 0.0 if self._idle_since is None else self._clock() - self._idle_since
        return Stats(
            newest_version=-1 if self._newest is None else self._newest,
            ready=len(self._ready),
            running=len(self._running),
            leased=counts.get(GroupState.LEASED, 0),
            issued=sum(counts.values()),
            consumed=counts.get(GroupState.CONSUMED, 0),
            dropped=dict(self._ledger.drop_reasons()),
            retried=dict(self._retried),
            staleness=dict(self._staleness),
            tokens_generated=self._tokens,
            idle_s=self._idle_s + idle_now,
            generation_s=self._generation_s,
        )

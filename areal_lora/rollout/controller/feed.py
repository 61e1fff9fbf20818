"""The book-keeping of one adapter: which groups are issued, which are ready, which are handed over.

Pure and synchronous: no sockets, no tasks, a clock that is passed in. The controller drives it
from real requests, the property test from a simulation.

    prompts -> admit -> begin -> finish -> take -> commit
                 ^        ^ retry |           |
                 |________|_______|___________|  dropped as stale or undone: the prompt is issued again

Every move is written to the ledger. It is flushed where something must not be forgotten: before a
step's groups are handed over, when a step is committed, when a group is done. Issues, tries and drops
since then may be forgotten in a crash: their prompts are issued again under the same key.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import msgspec

from areal_lora.errors import RolloutError, StalenessError
from areal_lora.processes.faults import reached
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.messages import Stats
from areal_lora.rollout.controller.groups import Finished, Lease, Ticket
from areal_lora.rollout.controller.prompts import PromptStream
from areal_lora.rollout.controller.staleness import StalenessBudget, Verdict
from areal_lora.rollout.ledger import reconcile
from areal_lora.rollout.ledger.ledger import Ledger
from areal_lora.rollout.ledger.records import Counters, GroupState, Row, decode_snapshot
from areal_lora.rollout.workflow import Episode
from areal_lora.types import AdapterRef

MAX_TRIES = 8  # requests of one issue
MAX_STALE = 4  # issues of one prompt that may come too late
MIN_LOST_IN_A_ROW = 16
BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0
UNSERVED_WAIT_S, UNSERVED_S = 0.2, 300.0
NO_VARIANCE = "no_variance"
K = TypeVar("K")

log = get_logger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Episode).decode


class AdapterFeed:
    """Admission, staleness and exactly-once of one adapter.

    ``on_expire(ticket)`` is called for a running group whose request is of no use any more; the caller
    abandons it. What is reported about it all the same is counted and ignored. A request that runs
    longer than ``lease_s`` is taken for lost. ``drop_uniform``: groups without variance of rewards
    are not trained on.
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
        lease_s: float = 3600.0,
        drop_uniform: bool = False,
    ) -> None:
        self.name, self.budget, self.max_running = name, budget, max_running
        self.last_fault = ""
        self._prompts, self._ledger, self._on_expire, self._clock = prompts, ledger, on_expire, clock
        self._lease_s, self._drop_uniform = lease_s, drop_uniform
        self._newest: int | None = None
        self._loaded = False
        self._waiting: list[Ticket] = []  # issued and not admitted yet, oldest issue first
        self._running: dict[int, Ticket] = {}
        self._ready: dict[int, Finished] = {}
        self._leases: dict[int, list[int]] = {}
        self._lost_in_a_row = 0
        self._uniform_in_a_row = 0
        self._unserved_since: float | None = None
        self._idle_since: float | None = None

    # ------------------------------------------------------------ trainers and versions

    def hello(self, version: int, *, trainer: str, snapshot: bytes = b"") -> None:
        """``trainer`` consumes next at ``version``; nothing is issued until it announces one.

        A trainer not seen before has loaded that version: earlier steps are consumed, later ones undone
        (`reconcile`). One that is known greets a restarted controller; the ledger stands as it left it.
        Raises RolloutError if neither ledger nor snapshot knows what was consumed before ``version``.
        """
        self._newest = None
        head = self._ledger.head
        # Its last batch may have been leased without reaching it.
        known = head.trainer == trainer and head.next_version in (version, version + 1)
        if not self._loaded:
            for row in self._ledger.rows(GroupState.RUNNING):  # of an earlier process: nobody waits for the answer
                self._ledger.requeue(row.seq, row.failed, row.resampled)
        if not known:
            decoded = decode_snapshot(snapshot, self.name)
            made = reconcile.plan_for(self._ledger, version, decoded)
            if made.rebuild:
                log.warning("ledger of %s: %s", self.name, made)
                for ticket in list(self._running.values()):
                    self._forget_running(ticket)
                    self._on_expire(ticket)
            else:
                log.info("ledger of %s at version %d: %s", self.name, version, made)
            reconcile.apply(self._ledger, made, decoded)
            self._ledger.head.trainer = trainer
        if not (known and self._loaded):
            self._load()
        self._drop_stale()
        self._ledger.check(self._live)
        self._ledger.flush()

    def _load(self) -> None:
        """Hold what the ledger holds. Requests that run in this process and are still wanted go on."""
        rows = self._ledger.rows(*_HELD)
        still = {row.seq: row for row in rows if row.state in (GroupState.ISSUED, GroupState.RUNNING)}
        for ticket in list(self._running.values()):
            row = still.get(ticket.seq)
            if row is None or (row.position, row.issue) != (ticket.prompt.position, ticket.issue):
                self._forget_running(ticket)
                self._on_expire(ticket)
        self._waiting.clear()
        self._ready.clear()
        self._leases.clear()
        for row in rows:
            if row.state is GroupState.LEASED:
                self._leases.setdefault(row.step, []).append(row.seq)
            elif row.state is GroupState.DONE:
                self._ready[row.seq] = self._finished(row)
            elif row.seq not in self._running:
                self._waiting.append(self._ticket(row))
        self._loaded = True

    def announce(self, version: int) -> None:
        """``version`` is active on the servers. Raises RolloutError if it is older than the newest announced."""
        if self._newest is None:
            self._idle_since = None if self._running else self._clock()
        elif version < self._newest:
            raise RolloutError(f"{self.name}@v{version} announced after v{self._newest}")
        if not self._loaded or version > self._ledger.head.next_version:
            raise RolloutError(f"{self.name}@v{version} announced before step {version - 1} was handed over")
        self._newest = version

    def has_announced(self, version: int) -> bool:
        return self._newest is not None and self._newest >= version

    # ------------------------------------------------------------ issuing

    def admit(self) -> Ticket | None:
        """The next group to ask for, if budget and concurrency allow one."""
        if self._newest is None or len(self._running) >= self.max_running:
            return None
        live = len(self._running) + len(self._ready)
        if not self.budget.capacity(newest=self._newest, next_version=self._ledger.head.next_version, live=live):
            return None
        ticket = self._waiting.pop(0) if self._waiting else self._issue_next()
        if self._idle_since is not None:
            self._counters.idle_s += self._clock() - self._idle_since
            self._idle_since = None
        self._running[ticket.seq] = ticket
        return ticket

    def _issue_next(self) -> Ticket:
        head = self._ledger.head
        while True:
            prompt = self._prompts.at(head.next_position)
            head.next_position += 1
            seq = self._ledger.issue(prompt.position, 1)
            refusal = self._prompts.refusal(prompt)
            if refusal is None:
                reached("controller.issued")
                return Ticket(seq=seq, prompt=prompt, issue=1)
            self._ledger.drop(seq, refusal)

    def begin(self, ticket: Ticket) -> AdapterRef | None:
        """The version to ask for now; None while no version is announced."""
        if self._newest is None:
            return None
        ticket.version, ticket.begun_s = self._newest, self._clock()
        ticket.deadline = ticket.begun_s + self._lease_s
        self._ledger.run(ticket.seq, self._newest, ticket.deadline)
        return AdapterRef(name=self.name, version=self._newest)

    def served_by(self, ticket: Ticket, server: str) -> None:
        """For the record: which server has the request."""
        if self._running.get(ticket.seq) is ticket:
            self._ledger.served_by(ticket.seq, server)

    def finish(self, ticket: Ticket, episode: Episode) -> bool:
        """All trajectories of the group are ``ok``; it is ready unless it came too late.

        False for a late duplicate: the group was answered, or given up, before.
        """
        live = self._running.get(ticket.seq)
        if live is None or (live.prompt.position, live.issue) != (ticket.prompt.position, ticket.issue):
            self._counters.late += 1
            return False
        self._forget_running(live)
        if live is not ticket or live.version is None:
            self._on_expire(live)  # the answer of a try that was given up: the next one is not needed
        self._lost_in_a_row, self._unserved_since = 0, None
        self._counters.tokens += sum(sum(t.loss_mask) for t in episode.group.trajectories)
        self._counters.generation_s += self._clock() - ticket.begun_s
        versions = [v for t in episode.group.trajectories for v in t.versions if v >= 0]
        finished = Finished(ticket=live, episode=episode, oldest=min(versions), newest=max(versions))
        next_version = self._ledger.head.next_version
        verdict = self.budget.verdict(oldest=finished.oldest, consume_version=next_version)
        if finished.newest > next_version:
            self._drop_and_reissue(live, reconcile.ROLLED_BACK)
        elif verdict is not Verdict.FRESH:
            self._drop_and_reissue(live, verdict)
        elif self._drop_uniform and len({t.reward for t in episode.group.trajectories}) == 1:
            self._ledger.drop(live.seq, NO_VARIANCE)
            self._uniform_in_a_row += 1
        else:
            self._uniform_in_a_row = 0
            self._ledger.finish(live.seq, finished.oldest, finished.newest, _encode(episode))
            self._ready[live.seq] = finished
        self._ledger.flush()
        reached("controller.group_done")
        return True

    def retry(
        self,
        ticket: Ticket,
        kind: str,
        detail: str,
        *,
        retryable: bool = True,
        served: bool = True,
        resample: bool = False,
    ) -> float | None:
        """Seconds to wait before the next :meth:`begin`, or None: the group is dropped for good, or not wanted.

        A request to a server that is gone (``served`` False) does not count, for ``UNSERVED_S``: the
        group waits for one to be (back) there. ``resample``: the same answer would fail again. Raises
        RolloutError when two steps' worth of groups in a row were lost this way.
        """
        if self._running.get(ticket.seq) is not ticket or ticket.version is None:
            self._counters.late += 1
            return None
        self.last_fault = f"{kind}: {detail}"
        if not served:
            if self._unserved_since is None:
                self._unserved_since = self._clock()
            served = self._clock() - self._unserved_since > UNSERVED_S
        else:
            self._unserved_since = None
        ticket.failed += served
        ticket.resampled += resample
        if retryable and ticket.failed < MAX_TRIES:
            self._ledger.requeue(ticket.seq, ticket.failed, ticket.resampled)
            ticket.version = None
            _count(self._counters.retried, kind)
            return min(BACK_OFF_S * 2 ** max(ticket.failed - 1, 0), MAX_BACK_OFF_S) if served else UNSERVED_WAIT_S
        self._forget_running(ticket)
        self._ledger.drop(ticket.seq, kind)
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= max(MIN_LOST_IN_A_ROW, 2 * self.budget.prompts_per_step):
            raise RolloutError(
                f"{self.name}: {self._lost_in_a_row} groups in a row were dropped after failures; last: "
                f"{self.last_fault} (fix: see the rollout servers' logs)"
            )
        return None

    def expire_overdue(self) -> None:
        """Give up requests that run beyond their lease; their groups are asked for again, as after a failure."""
        now = self._clock()
        for ticket in [t for t in self._running.values() if t.version is not None and now > t.deadline]:
            self._on_expire(ticket)
            wait_s = self.retry(ticket, "lease_expired", f"no answer within {self._lease_s:.0f} s")
            if wait_s is not None:
                self._forget_running(ticket)
                bisect.insort(self._waiting, replace(ticket), key=_seq)

    # ------------------------------------------------------------ handing over

    def take(self, step: int, version: int) -> Lease | None:
        """The groups of ``step``, or None while fewer than a batch are ready.

        A step that is not committed is served again unchanged. Raises StalenessError if a group
        beyond the budget would be handed over.
        """
        head = self._ledger.head
        if step in self._leases:
            rows = {row.seq: row for row in self._ledger.rows(GroupState.LEASED)}
            return self._hand_over(step, version, [self._finished(rows[seq]) for seq in self._leases[step]])
        if (step, version) != (head.next_version, head.next_version):
            raise RolloutError(f"{self.name}: step {step} at v{version} asked, but step {head.next_version} is next")
        needed = self.budget.prompts_per_step
        if len(self._ready) < needed:
            return None
        chosen = [self._ready[seq] for seq in sorted(self._ready)[:needed]]
        self._assert_fresh(chosen, version)
        seqs = [finished.ticket.seq for finished in chosen]
        self._ledger.lease(seqs, step)
        for finished in chosen:
            del self._ready[finished.ticket.seq]
            _count(self._counters.staleness, version - finished.oldest)
        self._leases[step] = seqs
        head.next_version = version + 1
        self._drop_stale()
        self._ledger.check(self._live)
        self._ledger.flush()
        reached("controller.leased")
        return self._hand_over(step, version, chosen)

    def _hand_over(self, step: int, version: int, finished: list[Finished]) -> Lease:
        self._assert_fresh(finished, version)
        return Lease(step=step, finished=tuple(finished), snapshot=self._ledger.snapshot(step + 1))

    def commit(self, step: int) -> None:
        """``step`` and all steps before it are in a durable checkpoint. Idempotent."""
        self._ledger.consume(step)
        for leased in [leased for leased in self._leases if leased <= step]:
            del self._leases[leased]
        self._ledger.flush()

    def _assert_fresh(self, chosen: list[Finished], version: int) -> None:
        for finished in chosen:
            oldest, newest = finished.oldest, finished.newest
            fresh = self.budget.verdict(oldest=oldest, consume_version=version) is Verdict.FRESH
            if not fresh or newest > version:
                raise StalenessError(
                    f"group {finished.ticket.prompt.uid} has tokens of v{oldest} to v{newest} and would be consumed "
                    f"at v{version}, max_staleness is {self.budget.max_staleness}"
                )

    def _drop_stale(self) -> None:
        """Drop what cannot be consumed at the next version or later, and issue those prompts again."""
        version = self._ledger.head.next_version
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

    def _drop_and_reissue(self, ticket: Ticket, reason: str) -> None:
        """Only staleness can repeat itself for ever: a prompt with too many late issues is given up, and counted."""
        stale = ticket.stale + (reason == Verdict.STALE)
        if stale >= MAX_STALE:
            self._ledger.drop(ticket.seq, f"{reason}_given_up")
            return
        self._ledger.drop(ticket.seq, reason)
        seq = self._ledger.issue(ticket.prompt.position, ticket.issue + 1, stale)
        self._waiting.append(Ticket(seq=seq, prompt=ticket.prompt, issue=ticket.issue + 1, stale=stale))

    # ------------------------------------------------------------ counting

    def _ticket(self, row: Row) -> Ticket:
        return Ticket(
            seq=row.seq,
            prompt=self._prompts.at(row.position),
            issue=row.issue,
            stale=row.stale,
            failed=row.failed,
            resampled=row.resampled,
        )

    def _finished(self, row: Row) -> Finished:
        return Finished(
            ticket=self._ticket(row),
            episode=_decode(self._ledger.payload(row.seq)),
            oldest=row.version,
            newest=row.newest,
        )

    def _forget_running(self, ticket: Ticket) -> None:
        del self._running[ticket.seq]
        if not self._running:
            self._idle_since = self._clock()

    @property
    def _counters(self) -> Counters:
        return self._ledger.head.counters

    @property
    def _live(self) -> int:
        leased = sum(len(seqs) for seqs in self._leases.values())
        return len(self._waiting) + len(self._running) + len(self._ready) + leased

    @property
    def note(self) -> str:
        """What keeps groups from becoming ready, for whoever waits for them."""
        if self._uniform_in_a_row >= self.budget.prompts_per_step:
            return (
                f"the last {self._uniform_in_a_row} groups had equal rewards and were dropped; with "
                "sampling.drop_uniform a task that is always or never solved gives no batch"
            )
        return f"last fault: {self.last_fault}" if self.last_fault else ""

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def running(self) -> int:
        return len(self._running)

    def stats(self) -> Stats:
        counts, dropped, counters = self._ledger.counts(), dict(self._ledger.drop_reasons()), self._counters
        idle_now = 0.0 if self._idle_since is None else self._clock() - self._idle_since
        return Stats(
            newest_version=-1 if self._newest is None else self._newest,
            waiting=len(self._waiting),
            ready=len(self._ready),
            running=len(self._running),
            leased=counts[GroupState.LEASED],
            leased_steps=len(self._leases),
            issued=self._ledger.head.issued,
            consumed=counts[GroupState.CONSUMED],
            dropped=dropped,
            reissued=sum(dropped.get(reason, 0) for reason in _REISSUED),
            rolled_back=dropped.get(reconcile.ROLLED_BACK, 0),
            retried=dict(counters.retried),
            late=counters.late,
            staleness=dict(counters.staleness),
            tokens_generated=counters.tokens,
            idle_s=counters.idle_s + idle_now,
            generation_s=counters.generation_s,
        )


_HELD = (GroupState.ISSUED, GroupState.RUNNING, GroupState.DONE, GroupState.LEASED)
_REISSUED = (Verdict.STALE, Verdict.FROM_THE_FUTURE, reconcile.ROLLED_BACK)


def _count(counts: dict[K, int], key: K) -> None:
    counts[key] = counts.get(key, 0) + 1


def _seq(ticket: Ticket) -> int:
    return ticket.seq

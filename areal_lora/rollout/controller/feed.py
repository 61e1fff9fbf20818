"""The feed of one adapter: which groups are issued, retried, ready and handed to the trainer.

Pure and synchronous: no sockets, no tasks, a clock that is passed in. The controller drives it
from real requests, the property test from a simulation.

    prompts -> admit -> begin -> finish -> take -> commit
                 ^        ^ retry |           |
                 |________|_______|___________|  dropped as stale or undone: the prompt is issued again

The feed decides. `GroupPool` carries out, in memory and in the ledger.
"""

import logging
from collections import deque
from collections.abc import Callable

from areal_lora.data.prompts import PromptStream
from areal_lora.errors import RolloutError, StalenessError
from areal_lora.obs.metrics.records import DroppedGroup, faults_text
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached
from areal_lora.rollout.channel.channel_messages import GroupSums, Stats
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller import groups
from areal_lora.rollout.controller.groups import FailureStreak, GroupPool, Lease, ScoredGroup, Ticket
from areal_lora.rollout.controller.pacing import STALE, Pacer, Pacing, StalenessBudget
from areal_lora.rollout.ledger.curricula import SolvedShares
from areal_lora.rollout.ledger.ledger import GroupState, Ledger
from areal_lora.rollout.ledger.reconcile import ROLLED_BACK, apply, decode_snapshot, plan_for, take_snapshot
from areal_lora.rollout.workflow import Episode
from areal_lora.types import AdapterRef

NO_VERSION = -1
NO_VARIANCE = "no_variance"
REISSUED = (STALE, ROLLED_BACK)

log = get_logger(__name__)


class AdapterFeed:
    """Admission, staleness and exactly-once of one adapter.

    ``on_expire(ticket)`` is called for a running group whose answer is not needed any more; the caller abandons
    its request. Later reports about it are counted and ignored. A request that runs longer than ``lease_s`` is
    taken for lost. ``drop_uniform``: groups without variance of rewards are not trained on. Prompts are drawn by their
    ``solved`` shares, where they are given.
    """

    def __init__(
        self,
        name: str,
        *,
        budget: StalenessBudget,
        pacing: Pacing,
        prompts: PromptStream,
        ledger: Ledger,
        max_running: int,
        on_expire: Callable[[Ticket], None],
        clock: Callable[[], float],
        lease_s: float = 3600.0,
        drop_uniform: bool = False,
        solved: SolvedShares | None = None,
    ) -> None:
        self.name, self.budget, self.max_running = name, budget, max_running
        self.newest = NO_VERSION  # the newest version announced
        self.groups = GroupPool(prompts, ledger, solved, on_expire=on_expire, clock=clock)
        self._dropped = deque[DroppedGroup](maxlen=budget.prompts_per_step)
        self.failures = FailureStreak()
        self.pacer = Pacer(pacing, budget, clock)
        self._ledger, self._clock, self._solved = ledger, clock, solved
        self._lease_s, self._drop_uniform = lease_s, drop_uniform
        self._uniform_in_a_row = 0
        self.sampled, self._sampled = GroupSums(), GroupSums()  # before the newest batch, and since
        self._resumed: list[int] = []  # the version of each trainer that has started while this process ran

    # ------------------------------------------------------------ trainers and versions

    def hello(self, version: int, *, trainer: str, snapshot: bytes = b"") -> None:
        """``trainer`` consumes next at ``version``; nothing is issued until it announces one.

        A trainer not seen before has loaded that version: earlier steps are consumed, later ones undone
        (`reconcile`). A known trainer greets a restarted controller; the ledger stays as the trainer left it.
        Raises RolloutError if neither ledger nor snapshot knows what was consumed before ``version``.
        """
        self.newest = NO_VERSION
        self.pacer.new_session()
        head = self._ledger.head
        # The last batch may have been leased without reaching the trainer.
        known = head.trainer == trainer and head.next_version in (version, version + 1)
        was_loaded = self.groups.loaded
        if not was_loaded:
            for row in self._ledger.table.rows(GroupState.RUNNING):  # requests of a previous process
                self._ledger.requeue(row.seq, row.failed, row.resampled)
        if not known:
            decoded = decode_snapshot(snapshot, self.name)
            plan = plan_for(self._ledger, version, decoded)
            level = logging.WARNING if plan.rebuild else logging.INFO
            log.log(level, "ledger of %s at version %d: %s", self.name, version, plan)
            if plan.rebuild:
                for ticket in list(self.groups.running.values()):
                    self.groups.expire(ticket)
                self.groups.birth += 1
                if self._solved is not None:
                    self._solved.restore(decoded.solved if decoded is not None else {})
            apply(self._ledger, plan, decoded)
            self._ledger.head.trainer = trainer
            self._resumed.append(version)
        if not (known and was_loaded):
            self.groups.load()
        self._drop_stale()
        self.groups.check_and_flush()

    def announce(self, version: int) -> None:
        """``version`` is active on the servers. Raises RolloutError if it is older than the newest announced."""
        if version < self.newest:
            raise RolloutError(f"{self.name}@v{version} announced after v{self.newest}")
        if not self.groups.loaded or version > self._ledger.head.next_version:
            raise RolloutError(f"{self.name}@v{version} announced before step {version - 1} was handed over")
        if self.newest == NO_VERSION and not self.groups.running:
            self.groups.idle_since_s = self._clock()
        self.newest = version

    def end(self, *, leaves: bool = False) -> None:
        """Issue nothing more until another trainer's `hello`; abandon what runs.

        Where the adapter ``leaves`` its ready and leased groups wait again: their trajectories would stay in the ledger
        of all. A checkpoint whose commit did not arrive is beyond the ledger's end: the next `hello` rebuilds it.
        """
        self.newest = NO_VERSION
        if leaves:
            for row in self._ledger.table.rows(GroupState.DONE, GroupState.LEASED):
                self._ledger.requeue(row.seq, row.failed, row.resampled)
                self._ledger.table.delete_payload(row.seq)
            head = self._ledger.head
            head.trainer, head.next_version = "", min(self.groups.leases, default=head.next_version)
            self.groups.load()
        for ticket in list(self.groups.running.values()):
            self.groups.on_expire(ticket)
            if ticket.version is not None:  # else it waits for its next try, and is on no server
                self._ledger.requeue(ticket.seq, ticket.failed, ticket.resampled)
            self.groups.wait_again(ticket)
        self.groups.check_and_flush()

    # ------------------------------------------------------------ issuing

    def admit(self) -> Ticket | None:
        """The next group to request, if pacing, budget and concurrency allow one.

        A prompt that came too late has long answers: it waits for a version announced since the last hand-over,
        which gives it a step more than the version before.
        """
        groups, next_version, live = self.groups, self._ledger.head.next_version, self.groups.live(self.pacer.kept)
        if self.newest == NO_VERSION or len(groups.running) >= self.max_running:
            return None
        if not self.pacer.capacity(newest=self.newest, next_version=next_version, live=live):
            return None
        step = next_version + (live + len(groups.waiting)) // self.budget.prompts_per_step
        return groups.start(also_stale=self.newest >= next_version - 1, step=step)

    def begin(self, ticket: Ticket) -> AdapterRef | None:
        """The version to request now; None while no version is announced."""
        if self.newest == NO_VERSION:
            return None
        ticket.version, ticket.deadline = self.newest, self._clock() + self._lease_s
        ticket.trainers = len(self._resumed)
        self._ledger.run(ticket.seq, self.newest)
        return AdapterRef(name=self.name, version=self.newest)

    def finish(self, ticket: Ticket, episode: Episode) -> bool:
        """Accept a group whose trajectories are all ``ok``; it is ready unless it came too late.

        False for a late duplicate: the group was answered, or abandoned, before.
        """
        live, counters = self.groups.running.get(ticket.seq), self._ledger.head.counters
        if live is None or live.key != ticket.key:
            counters.late += 1
            return False
        columns = [trajectory.columns for trajectory in episode.group.trajectories]
        tokens = sum(each.n_sampled for each in columns)
        self.groups.stop(live, tokens)
        if live is not ticket or live.version is None:
            self.groups.on_expire(live)  # the answer belongs to an abandoned try: the next try is not needed
        self.failures.answered()
        if self._solved is not None:
            self._solved.put(live.prompt.position, episode.group)
        counters.tokens += tokens
        self._sampled.add(episode.group)
        oldest, newest = zip(*(each.span for each in columns), strict=True)
        finished = ScoredGroup(
            ticket=live, episode=episode, oldest=min(oldest), newest=max(newest), ready_s=self._clock()
        )
        next_version = self._ledger.head.next_version
        reason = self.budget.refusal(finished.oldest, finished.newest, next_version)
        # Of the previous trainer, so it is lost, or of the same number and made since: that is not known here.
        if finished.newest > min(self._resumed[ticket.trainers :], default=finished.newest):
            reason = ROLLED_BACK
        if reason:
            self._dropped.append(groups.dropped(live, reason, episode))
            self.groups.reissue(live, reason)
        elif self._drop_uniform and finished.uniform:
            self.pacer.answered(kept=False)
            self._dropped.append(groups.dropped(live, NO_VARIANCE, episode))
            self._ledger.drop(live.seq, NO_VARIANCE)
            self._uniform_in_a_row += 1
        else:
            self._uniform_in_a_row = 0
            self.pacer.answered(kept=True)
            if not self.groups.finish(finished):
                fix = "fewer sampling.n_samples or a smaller rollout.max_model_len"
                self.failures.details[groups.TOO_LARGE] = f"a group exceeds {groups.MAX_BYTES:,} bytes (fix: {fix})"
        self._ledger.flush()
        reached("controller.group_done")
        return True

    def retry(self, ticket: Ticket, failure: GenerationFault, episode: Episode | None = None) -> float | None:
        """Seconds to wait before the next :meth:`begin`, or None: the group is dropped, or was abandoned before.

        ``episode`` has the answers, where the failure was in scoring them. See `groups` for the policy. Raises
        RolloutError when two steps' worth of groups in a row were dropped.
        """
        counters = self._ledger.head.counters
        if self.groups.running.get(ticket.seq) is not ticket or ticket.version is None:
            counters.late += 1
            return None
        unserved_s = self.failures.failed(failure, self._clock())
        ticket.failed, wait_s = groups.decide(failure, failed=ticket.failed, unserved_s=unserved_s)
        ticket.resampled += failure.resample
        if wait_s is None:
            self.groups.stop(ticket)
            answers = episode or groups.unanswered(ticket, self.name, failure)
            self._dropped.append(groups.dropped(ticket, str(failure), answers))
            self._ledger.drop(ticket.seq, failure.kind)
            self.failures.lost(failure, self.name, self.budget.prompts_per_step)
            return None
        self._ledger.requeue(ticket.seq, ticket.failed, ticket.resampled)
        ticket.version = None
        counters.retried[failure.kind] = counters.retried.get(failure.kind, 0) + 1
        return wait_s

    def expire_overdue(self) -> None:
        """Abandon requests that run beyond their lease; their groups are retried, as after a failure."""
        now = self._clock()
        overdue = GenerationFault(FaultKind.LEASE, f"no answer within {self._lease_s:.0f} s")
        for ticket in [t for t in self.groups.running.values() if t.version is not None and now > t.deadline]:
            self.groups.on_expire(ticket)
            if self.retry(ticket, overdue) is not None:
                self.groups.wait_again(ticket)

    # ------------------------------------------------------------ handing over

    def take(self, step: int) -> Lease | None:
        """The groups of ``step``, oldest issue first, or None while fewer than a batch are ready.

        Groups of the oldest versions are chosen, because they would be too old first. The choice does not change the
        mean lag: a group that stays waits as many versions as another one would. A step that is not committed is
        served again unchanged. Raises StalenessError if a group beyond the budget would be handed over.
        """
        groups, next_version = self.groups, self._ledger.head.next_version
        chosen = groups.leased(step)
        if chosen:
            check_fresh(chosen, step, self.budget)
        elif step != next_version:
            raise RolloutError(f"{self.name}: step {step} requested, but step {next_version} is next")
        else:
            self.pacer.requested(
                (finished.ready_s for finished in groups.ready.values()), live=groups.live(self.pacer.kept)
            )
            if len(groups.ready) < self.budget.prompts_per_step:
                return None
            by_age = sorted(groups.ready, key=lambda seq: (groups.ready[seq].oldest, seq))
            chosen = [groups.ready[seq] for seq in sorted(by_age[: self.budget.prompts_per_step])]
            check_fresh(chosen, step, self.budget)
            groups.lease(chosen, step)
            self.sampled, self._sampled = self._sampled, GroupSums()
            self._ledger.head.next_version = step + 1
            self._drop_stale()
            groups.check_and_flush()
            reached("controller.leased")
            self.pacer.taken()
        snapshot = take_snapshot(self._ledger, step + 1, None if self._solved is None else self._solved.counts)
        return Lease(finished=tuple(chosen), snapshot=snapshot)

    def commit(self, step: int) -> None:
        """``step`` and all steps before it are in a durable checkpoint. Idempotent."""
        self.groups.consume(step)
        self._ledger.flush()

    def _drop_stale(self) -> None:
        """Drop groups that cannot be consumed at the next version or later, and issue their prompts again."""
        version = self._ledger.head.next_version
        for finished in list(self.groups.ready.values()):
            if reason := self.budget.refusal(finished.oldest, finished.newest, version):
                del self.groups.ready[finished.ticket.seq]
                self._dropped.append(groups.dropped(finished.ticket, reason, finished.episode))
                self.groups.reissue(finished.ticket, reason)
        for ticket in list(self.groups.running.values()):
            held = ticket.version
            if held is not None and (reason := self.budget.refusal(held, held, version)):
                self.groups.expire(ticket)
                self.groups.reissue(ticket, reason)

    # ------------------------------------------------------------ reporting

    def take_dropped(self) -> tuple[DroppedGroup, ...]:
        """Groups that were dropped since the last call, at most a step's worth."""
        taken = tuple(self._dropped)
        self._dropped.clear()
        return taken

    @property
    def note(self) -> str:
        """Return the reasons why groups may not become ready, for a trainer that waits for them."""
        if self._uniform_in_a_row >= self.budget.prompts_per_step:
            return (
                f"the last {self._uniform_in_a_row} groups had equal rewards and were dropped; with "
                "algorithm.drop_uniform a task that is always or never solved gives no batch"
            )
        ledger = self._ledger
        return faults_text(ledger.head.counters.retried, ledger.drop_reasons, self.failures.details)

    def stats(self) -> Stats:
        ledger, groups, pacing = self._ledger, self.groups, self.pacer
        counts, dropped, counters = ledger.counts, dict(ledger.drop_reasons), ledger.head.counters
        idle_s = 0.0 if groups.idle_since_s is None else self._clock() - groups.idle_since_s
        return Stats(
            ready=len(groups.ready),
            running=len(groups.running),
            leased=counts[GroupState.LEASED],
            issued=ledger.head.issued,
            consumed=counts[GroupState.CONSUMED],
            dropped=dropped,
            reissued=sum(dropped.get(reason, 0) for reason in REISSUED),
            retried=dict(counters.retried),
            late=counters.late,
            tokens_generated=counters.tokens,
            idle_s=counters.idle_s + idle_s,
            ahead=pacing.ahead,
            margin_s=pacing.margin_s,
            spare_s=pacing.spare_s,
            faults=dict(self.failures.details),
        )


def check_fresh(chosen: list[ScoredGroup], version: int, budget: StalenessBudget) -> None:
    """Raise StalenessError if a group may not be consumed at ``version`` (contract C7)."""
    for finished in chosen:
        if budget.refusal(finished.oldest, finished.newest, version):
            raise StalenessError(
                f"group {finished.ticket.prompt.uid} has tokens of v{finished.oldest} to v{finished.newest} and would "
                f"be consumed at v{version}, max_staleness is {budget.max_staleness}"
            )

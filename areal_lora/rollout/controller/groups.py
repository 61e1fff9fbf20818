"""The prompt groups of one adapter in the controller: issued, scored, leased, and tried again after a failure.

Live groups are in memory and in the ledger: every move is made in both. The ledger is flushed where a move must survive
a crash: when a group is done, before a step's groups are leased, when a step is committed. Issues, tries and drops
since the last flush may be lost in a crash. Their prompts are issued again under the same key.
"""

import bisect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter

import msgspec

from areal_lora.data.prompts import Prompt, PromptStream
from areal_lora.errors import RolloutError, UserCodeError
from areal_lora.obs.metrics.records import DroppedGroup, GroupText
from areal_lora.processes.watched import reached
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.pacing import STALE
from areal_lora.rollout.ledger.curricula import SolvedShares
from areal_lora.rollout.ledger.ledger import LIVE, GroupState, Ledger, LedgerRow
from areal_lora.rollout.workflow import Episode
from areal_lora.types import AdapterRef, Cause, TokenColumns, Trajectory, TrajectoryGroup

MAX_TRIES = 8  # requests of one issue
CODE_TRIES = 3  # of one whose answers user code fails on: another answer may pass, time changes nothing
MAX_STALE = 4  # issues of one prompt that may come too late
MIN_LOST_IN_A_ROW = 16
TOO_LARGE, MAX_BYTES = "too_large", 999_000_000  # SQLite's limit of a row is 10^9 bytes
BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0
UNSERVED_WAIT_S, UNSERVED_S = 0.2, 300.0
USER_CODE = (FaultKind.SCORER, FaultKind.ENVIRONMENT, FaultKind.AGENT, FaultKind.WORKFLOW)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Episode).decode


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One issued group. ``version`` is None while the group waits for a retry.

    ``failed`` tries count towards `MAX_TRIES`. ``resampled`` of them failed because of the answer itself, so the next
    try samples another answer. ``birth`` counts the rebuilds of the ledger before the issue: keys repeat after one.
    ``trainers`` is the number of those that had started when the request did.
    """

    seq: int
    prompt: Prompt
    issue: int
    birth: int = 0
    stale: int = 0
    failed: int = 0
    resampled: int = 0
    version: int | None = None
    deadline: float = 0.0
    trainers: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal for the tries of one issue."""
        return self.prompt.position, self.issue, self.birth


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A scored group, ready since ``ready_s``; ``oldest`` and ``newest`` are the versions of its tokens."""

    ticket: Ticket
    episode: Episode
    oldest: int
    newest: int
    ready_s: float = -math.inf  # before this process

    @property
    def uniform(self) -> bool:
        """Whether all rewards are equal. Given answers do not need rewards that differ."""
        if any(trajectory.given for trajectory in self.episode.group.trajectories):
            return False
        return len({trajectory.reward for trajectory in self.episode.group.trajectories}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The groups of one step, handed to the trainer and not yet committed."""

    finished: tuple[ScoredGroup, ...]
    snapshot: bytes

    @property
    def groups(self) -> tuple[TrajectoryGroup, ...]:
        return tuple(finished.episode.group for finished in self.finished)


def group_text(ticket: Ticket, episode: Episode) -> GroupText:
    messages = ticket.prompt.sample.messages
    return GroupText(
        prompt=ticket.prompt.text,
        answers=episode.texts,
        turns=episode.turns,
        messages="" if messages is None else json.dumps(messages, ensure_ascii=False),
        gold=ticket.prompt.sample.gold,
        tries=ticket.issue + ticket.failed,
    )


def unanswered(ticket: Ticket, adapter: str, fault: GenerationFault) -> Episode:
    """A group of the prompt alone, of a try that ended in ``fault``."""
    prompt, version = ticket.prompt, ticket.version or 0
    trajectory = Trajectory(
        uid=prompt.uid,
        sample=0,
        adapter=AdapterRef(name=adapter, version=version),
        columns=TokenColumns.unsampled(prompt.token_ids),
        reward=0.0,
        outcome=fault.outcome,
        finish_reason=fault.kind,
        detail=fault.detail,
    )
    return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=(trajectory,)), texts=("",))


def decide(failure: GenerationFault, *, failed: int, unserved_s: float) -> tuple[int, float | None]:
    """The failed tries after ``failed`` and ``failure``, and the wait before the next one; None: the group is dropped.

    A request that no server had does not count: the group waits for a server, which may load a model for hours; the
    launcher restarts servers, and ends the run when they cannot be. So it waits for what user code connects to, but
    does not count only for the first ``UNSERVED_S``. The pause grows with the outage. What user code fails on by itself
    has ``CODE_TRIES`` without growing pauses.
    """
    counts = not failure.unserved or (failure.cause is Cause.UNREACHABLE and unserved_s > UNSERVED_S)
    failed += counts
    by_code = failure.cause is Cause.CODE
    if not failure.retryable or failed >= (CODE_TRIES if by_code else MAX_TRIES):
        return failed, None
    if counts:
        return failed, BACK_OFF_S if by_code else back_off_s(failed)
    return failed, min(max(UNSERVED_WAIT_S, unserved_s / 2), MAX_BACK_OFF_S)


def back_off_s(failed: int) -> float:
    return float(min(BACK_OFF_S * 2 ** max(failed - 1, 0), MAX_BACK_OFF_S))


@dataclass(slots=True)
class FailureStreak:
    """Failures of an adapter's groups since the last answer; ``details`` are the last ones by kind, of all time."""

    details: dict[str, str] = field(default_factory=dict)
    lost_in_a_row: int = 0
    unserved_since: float | None = None

    def failed(self, failure: GenerationFault, now: float) -> float:
        """Seconds since which no server has had a request; 0 where one has answered, if only with an error."""
        self.details[failure.kind] = failure.detail
        if not failure.unserved:
            self.unserved_since = None
            return 0.0
        if self.unserved_since is None:
            self.unserved_since = now
        return now - self.unserved_since

    def answered(self) -> None:
        self.lost_in_a_row, self.unserved_since = 0, None

    def lost(self, last: GenerationFault, adapter: str, prompts_per_step: int) -> None:
        """Count a group that was dropped after the failure ``last``.

        Raises RolloutError when two steps' worth of groups in a row were dropped: UserCodeError where user code fails
        by itself.
        """
        self.lost_in_a_row += 1
        if self.lost_in_a_row < max(MIN_LOST_IN_A_ROW, 2 * prompts_per_step):
            return
        text = f"{adapter}: {self.lost_in_a_row} groups in a row were dropped; last: {last}"
        if last.cause is Cause.CODE:
            raise UserCodeError(f"{text} (fix: correct the code; the controller's log has its traceback)")
        if last.cause is Cause.UNREACHABLE:
            raise RolloutError(f"{text} (fix: start what the code connects to)")
        logs = "controller's log" if last.kind in USER_CODE else "rollout servers' logs"
        raise RolloutError(f"{text} (fix: see the {logs})")


def dropped(ticket: Ticket, reason: str, episode: Episode) -> DroppedGroup:
    return DroppedGroup(reason=reason, group=episode.group.recorded(), text=group_text(ticket, episode))


class GroupPool:
    """Groups by state: ``waiting`` (oldest issue first), ``running`` and ``ready`` by seq, ``leases`` by step."""

    def __init__(
        self,
        prompts: PromptStream,
        ledger: Ledger,
        solved: SolvedShares | None,
        *,
        on_expire: Callable[[Ticket], None],
        clock: Callable[[], float],
    ) -> None:
        self.ledger = ledger
        self.loaded = False
        self.birth = 0
        self.waiting: list[Ticket] = []
        self.running: dict[int, Ticket] = {}
        self.ready: dict[int, ScoredGroup] = {}
        self.leases: dict[int, list[int]] = {}
        self.idle_since_s: float | None = None  # nothing in flight
        self.ended: list[int | None] = []
        """Tokens to train on of groups that have run, None without an answer; `runtime.Admission` empties it."""
        self.on_expire, self._prompts, self._solved, self._clock = on_expire, prompts, solved, clock

    # ------------------------------------------------------------ loading

    def load(self) -> None:
        """Take over what the ledger holds. Requests that run in this process and are still wanted keep running."""
        if self._prompts.order is not None:
            self._prompts.order.starts = self.ledger.head.stages
        rows = self.ledger.table.rows(*LIVE)
        wanted = {row.seq: row for row in rows if row.state in (GroupState.ISSUED, GroupState.RUNNING)}
        for ticket in list(self.running.values()):
            row = wanted.get(ticket.seq)
            if row is None or (row.position, row.issue) != (ticket.prompt.position, ticket.issue):
                self.expire(ticket)
        self.waiting.clear()
        self.ready.clear()
        self.leases.clear()
        for row in rows:
            if row.state is GroupState.LEASED:
                self.leases.setdefault(row.step, []).append(row.seq)
            elif row.state is GroupState.DONE:
                self.ready[row.seq] = self._finished(row)
            elif row.seq not in self.running:
                self.waiting.append(self._ticket(row))
        self.loaded = True

    def _ticket(self, row: LedgerRow) -> Ticket:
        return Ticket(
            seq=row.seq,
            prompt=self._prompts.at(row.position),
            issue=row.issue,
            birth=self.birth,
            stale=row.stale,
            failed=row.failed,
            resampled=row.resampled,
        )

    def _finished(self, row: LedgerRow) -> ScoredGroup:
        episode = _decode(self.ledger.table.payload(row.seq))
        return ScoredGroup(ticket=self._ticket(row), episode=episode, oldest=row.version, newest=row.newest)

    # ------------------------------------------------------------ issued and running

    def start(self, *, also_stale: bool, step: int) -> Ticket:
        """The oldest waiting issue, or a new one, which is for ``step``, now counted as running.

        Prompts whose last issue came too late are among them only if ``also_stale``.
        """
        chosen = next((i for i, ticket in enumerate(self.waiting) if also_stale or not ticket.stale), None)
        head, ticket = self.ledger.head, None if chosen is None else self.waiting.pop(chosen)
        while ticket is None:
            position = head.next_position
            head.next_position += 1
            if self._solved is not None and not self._solved.draws(position):
                continue
            if self._prompts.order is not None:
                self._prompts.order.issue(position, step)
            prompt = self._prompts.at(position)
            seq = self.ledger.issue(prompt.position, 1)
            if (refusal := self._prompts.refusal(prompt)) is not None:
                self.ledger.drop(seq, refusal)
                continue
            reached("controller.issued")
            ticket = Ticket(seq=seq, prompt=prompt, issue=1, birth=self.birth)
        if self.idle_since_s is not None:
            head.counters.idle_s += self._clock() - self.idle_since_s
            self.idle_since_s = None
        self.running[ticket.seq] = ticket
        return ticket

    def stop(self, ticket: Ticket, tokens: int | None = None) -> None:
        """``ticket`` runs no longer; the caller moves its row. If it was answered there are ``tokens`` to train on."""
        del self.running[ticket.seq]
        self.ended.append(tokens)
        if not self.running:
            self.idle_since_s = self._clock()

    def expire(self, ticket: Ticket) -> None:
        self.stop(ticket)
        self.on_expire(ticket)

    def wait_again(self, ticket: Ticket) -> None:
        """Put a running issue back among the waiting ones, as a new ticket: late reports of the old one are ignored."""
        self.stop(ticket)
        bisect.insort(self.waiting, replace(ticket), key=attrgetter("seq"))

    def reissue(self, ticket: Ticket, reason: str) -> None:
        """Drop an issue and issue its prompt again, unless ``MAX_STALE`` issues came too late.

        Only staleness can repeat without end.
        """
        stale = ticket.stale + (reason == STALE)
        if stale >= MAX_STALE:
            self.ledger.drop(ticket.seq, f"{reason}_given_up")
            return
        self.ledger.drop(ticket.seq, reason)
        seq = self.ledger.issue(ticket.prompt.position, ticket.issue + 1, stale)
        again = Ticket(seq=seq, prompt=ticket.prompt, issue=ticket.issue + 1, birth=self.birth, stale=stale)
        self.waiting.append(again)

    # ------------------------------------------------------------ done and leased

    def live(self, kept: float) -> int:
        """The number of groups for the next step and later ones if of the running ones this share is ``kept``."""
        return len(self.ready) + math.ceil(len(self.running) * kept)

    def finish(self, finished: ScoredGroup) -> bool:
        """Whether the group is ready. Its trajectories may exceed ``MAX_BYTES``: then it is dropped."""
        seq, payload = finished.ticket.seq, _encode(finished.episode)
        if len(payload) > MAX_BYTES:
            self.ledger.drop(seq, TOO_LARGE)
            return False
        self.ledger.finish(seq, finished.oldest, finished.newest, payload)
        self.ready[seq] = finished
        return True

    def lease(self, chosen: list[ScoredGroup], step: int) -> None:
        seqs = [finished.ticket.seq for finished in chosen]
        self.ledger.lease(seqs, step)
        for seq in seqs:
            del self.ready[seq]
        self.leases[step] = seqs

    def leased(self, step: int) -> list[ScoredGroup]:
        """The groups leased at ``step``, read from the ledger; none if there is no lease."""
        rows = {row.seq: row for row in self.ledger.table.rows(GroupState.LEASED)} if step in self.leases else {}
        return [self._finished(rows[seq]) for seq in self.leases.get(step, ())]

    def consume(self, step: int) -> None:
        """Every group leased at ``step`` or before is consumed."""
        self.ledger.consume(step)
        for leased in [leased for leased in self.leases if leased <= step]:
            del self.leases[leased]

    # ------------------------------------------------------------ the whole

    def check_and_flush(self) -> None:
        """Compare the ledger with the groups held here, then flush it. Raises LedgerError."""
        leased = sum(len(seqs) for seqs in self.leases.values())
        self.ledger.check(len(self.waiting) + len(self.running) + len(self.ready) + leased)
        self.ledger.flush()

"""Retry policy of rollout requests: which failures are retried, when, and what ends the run (contract C8). Pure."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from areal_lora.errors import RolloutError, UserCodeError
from areal_lora.rollout.channel.channel_messages import Stats
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.pacing import Freshness, PacingStatus
from areal_lora.rollout.controller.pool import GroupPool
from areal_lora.rollout.ledger.file import GroupState
from areal_lora.rollout.ledger.reconcile import ROLLED_BACK
from areal_lora.types import Cause, Trajectory

MAX_TRIES = 8  # requests of one issue
CODE_TRIES = 3  # of one whose answers user code fails on: another answer may pass, time changes nothing
MIN_LOST_IN_A_ROW = 16
BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0
UNSERVED_WAIT_S, UNSERVED_S = 0.2, 300.0
# Faults of the transport or the server: the retry asks for the same answer, with the same seed.
# Not the time of an episode, which may never end with these answers.
SAME_ANSWER = (FaultKind.CONNECTION, FaultKind.RETIRED, FaultKind.SERVER_ERROR, FaultKind.ABORTED)
UNSERVED = (FaultKind.CONNECTION, FaultKind.RETIRED)  # a server that restarts is lost, then without the version
USER_CODE = (FaultKind.SCORER, FaultKind.ENVIRONMENT, FaultKind.AGENT, FaultKind.WORKFLOW)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Reason of a failed request of a group.

    ``retryable`` is False where the same request would be refused again. ``served`` is False where no server had
    the request. ``resample``: the answer itself was at fault, and a retry with the same seed would fail again.
    ``cause`` is that of user code.
    """

    kind: str
    detail: str
    _: KW_ONLY
    retryable: bool = True
    served: bool = True
    resample: bool = False
    cause: Cause = Cause.OTHER

    @property
    def unserved(self) -> bool:
        """Whether nothing has had the request yet: no server, or not what user code connects to."""
        return not self.served or self.cause is Cause.UNREACHABLE

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def generation_failure(fault: GenerationFault) -> RequestFailure:
    """Classify a request that gave no answer."""
    return RequestFailure(
        fault.kind,
        fault.detail,
        retryable=fault.retryable,
        served=fault.kind not in UNSERVED,
        resample=fault.kind not in SAME_ANSWER,
        cause=fault.cause,
    )


def scoring_failure(trajectory: Trajectory) -> RequestFailure:
    """Classify a group with ``trajectory``, whose outcome is not ``ok``."""
    detail = f"{trajectory.outcome}: {trajectory.detail}"
    return RequestFailure(FaultKind.SCORER, detail, resample=True, cause=trajectory.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """``failed`` is the new count of failed tries. ``wait_s`` precedes the next one; None: the group is dropped."""

    failed: int
    wait_s: float | None


def decide(failure: RequestFailure, *, failed: int, unserved_s: float) -> Retry:
    """Count ``failure`` after ``failed`` earlier ones and choose the wait before the next try.

    A request that no server had does not count: the group waits for a server, which may load a model for hours; the
    launcher restarts servers, and ends the run when they cannot be. So it waits for what user code connects to, with a
    pause that grows with the outage, but does not count only for the first ``UNSERVED_S``. What user code fails
    on by itself has ``CODE_TRIES`` without growing pauses.
    """
    counts = not failure.unserved or (failure.cause is Cause.UNREACHABLE and unserved_s > UNSERVED_S)
    failed += counts
    by_code = failure.cause is Cause.CODE
    if not failure.retryable or failed >= (CODE_TRIES if by_code else MAX_TRIES):
        return Retry(failed=failed, wait_s=None)
    if counts:
        return Retry(failed=failed, wait_s=BACK_OFF_S if by_code else back_off_s(failed))
    longer_s = unserved_s / 2 if failure.cause is Cause.UNREACHABLE else 0.0
    return Retry(failed=failed, wait_s=min(max(UNSERVED_WAIT_S, longer_s), MAX_BACK_OFF_S))


def back_off_s(failed: int) -> float:
    return float(min(BACK_OFF_S * 2 ** max(failed - 1, 0), MAX_BACK_OFF_S))


@dataclass(slots=True)
class FailureStreak:
    """Failures of an adapter's groups since the last answer; ``details`` are the last ones by kind, of all time."""

    last: RequestFailure | None = None
    details: dict[str, str] = field(default_factory=dict)
    lost_in_a_row: int = 0
    unserved_since: float | None = None

    def failed(self, failure: RequestFailure, now: float) -> float:
        """Seconds since which no server has had a request; 0 where one has answered, if only with an error."""
        self.last, self.details[failure.kind] = failure, failure.detail
        if not failure.unserved:
            self.unserved_since = None
            return 0.0
        if self.unserved_since is None:
            self.unserved_since = now
        return now - self.unserved_since

    def answered(self) -> None:
        self.lost_in_a_row, self.unserved_since = 0, None

    def lost(self, adapter: str, prompts_per_step: int) -> None:
        """Count a dropped group. Raises RolloutError when two steps' worth of groups in a row were dropped.

        It is a UserCodeError where user code fails by itself.
        """
        self.lost_in_a_row += 1
        if self.lost_in_a_row < max(MIN_LOST_IN_A_ROW, 2 * prompts_per_step):
            return
        last = self.last or RequestFailure("unknown", "")
        text = f"{adapter}: {self.lost_in_a_row} groups in a row were dropped; last: {last}"
        if last.cause is Cause.CODE:
            raise UserCodeError(f"{text} (fix: correct the code; the controller's log has its traceback)")
        if last.cause is Cause.UNREACHABLE:
            raise RolloutError(f"{text} (fix: start what the code connects to)")
        logs = "controller's log" if last.kind in USER_CODE else "rollout servers' logs"
        raise RolloutError(f"{text} (fix: see the {logs})")


K = TypeVar("K")
REISSUED = (Freshness.STALE, Freshness.FROM_THE_FUTURE, ROLLED_BACK)


def count(counts: dict[K, int], key: K) -> None:
    counts[key] = counts.get(key, 0) + 1


def stats_of(pool: GroupPool, newest_version: int, pacing: PacingStatus, faults: dict[str, str]) -> Stats:
    """Counts of the ledger and of the groups held now; see :class:`Stats`."""
    ledger = pool.ledger
    counts, dropped, counters = ledger.counts, dict(ledger.drop_reasons), ledger.head.counters
    return Stats(
        newest_version=newest_version,
        waiting=len(pool.waiting),
        ready=len(pool.ready),
        running=len(pool.running),
        leased=counts[GroupState.LEASED],
        leased_steps=len(pool.leases),
        issued=ledger.head.issued,
        consumed=counts[GroupState.CONSUMED],
        dropped=dropped,
        reissued=sum(dropped.get(reason, 0) for reason in REISSUED),
        rolled_back=dropped.get(ROLLED_BACK, 0),
        retried=dict(counters.retried),
        late=counters.late,
        staleness=dict(counters.staleness),
        tokens_generated=counters.tokens,
        idle_s=counters.idle_s + pool.idle.so_far_s,
        generation_s=counters.generation_s,
        ahead=pacing.ahead,
        margin_s=pacing.margin_s,
        spare_s=pacing.spare_s,
        faults=dict(faults),
    )

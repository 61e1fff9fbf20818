"""Retry policy of rollout requests: which failures are retried, when, and what ends the run (contract C8). Pure."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from areal_lora.errors import RolloutError
from areal_lora.rollout.client import FaultKind, GenerationFault
from areal_lora.types import Trajectory

MAX_TRIES = 8  # requests of one issue
MIN_LOST_IN_A_ROW = 16
BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0
UNSERVED_WAIT_S, UNSERVED_S = 0.2, 300.0
# Faults of the transport or the server: the retry asks for the same answer, with the same seed.
SAME_ANSWER = (FaultKind.CONNECTION, FaultKind.RETIRED, FaultKind.SERVER_ERROR, FaultKind.ABORTED)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Reason of a failed request of a group.

    ``retryable`` is False where the same request would be refused again. ``served`` is False where no server had
    the request. ``resample``: the answer itself was at fault, and a retry with the same seed would fail again.
    """

    kind: str
    detail: str
    _: KW_ONLY
    retryable: bool = True
    served: bool = True
    resample: bool = False


def generation_failure(fault: GenerationFault) -> RequestFailure:
    """Classify a request that gave no answer."""
    return RequestFailure(
        fault.kind,
        fault.detail,
        retryable=fault.retryable,
        served=fault.kind is not FaultKind.CONNECTION,
        resample=fault.kind not in SAME_ANSWER,
    )


def scoring_failure(trajectory: Trajectory) -> RequestFailure:
    """Classify a group with ``trajectory``, whose outcome is not ``ok``."""
    return RequestFailure(FaultKind.SCORER, f"{trajectory.outcome}: {trajectory.detail}", resample=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """``failed`` is the new count of failed tries. ``wait_s`` precedes the next one; None: the group is dropped."""

    failed: int
    wait_s: float | None


def decide(failure: RequestFailure, *, failed: int, unserved_s: float) -> Retry:
    """Count ``failure`` after ``failed`` earlier ones and choose the wait before the next try.

    A request that no server had does not count for the first ``UNSERVED_S`` of an outage: the group waits for a
    server.
    """
    counts = failure.served or unserved_s > UNSERVED_S
    failed += counts
    if not failure.retryable or failed >= MAX_TRIES:
        return Retry(failed=failed, wait_s=None)
    return Retry(failed=failed, wait_s=back_off_s(failed) if counts else UNSERVED_WAIT_S)


def back_off_s(failed: int) -> float:
    return float(min(BACK_OFF_S * 2 ** max(failed - 1, 0), MAX_BACK_OFF_S))


@dataclass(slots=True)
class FailureStreak:
    """Failures of an adapter's groups since the last answer."""

    last: str = ""
    lost_in_a_row: int = 0
    unserved_since: float | None = None

    def failed(self, failure: RequestFailure, now: float) -> float:
        """Seconds since which no server has had a request; 0 where one has answered, if only with an error."""
        self.last = f"{failure.kind}: {failure.detail}"
        if failure.served:
            self.unserved_since = None
            return 0.0
        if self.unserved_since is None:
            self.unserved_since = now
        return now - self.unserved_since

    def answered(self) -> None:
        self.lost_in_a_row, self.unserved_since = 0, None

    def lost(self, adapter: str, prompts_per_step: int) -> None:
        """Count a dropped group. Raises RolloutError when two steps' worth of groups in a row were dropped."""
        self.lost_in_a_row += 1
        if self.lost_in_a_row >= max(MIN_LOST_IN_A_ROW, 2 * prompts_per_step):
            raise RolloutError(
                f"{adapter}: {self.lost_in_a_row} groups in a row were dropped after failures; last: "
                f"{self.last} (fix: see the rollout servers' logs)"
            )

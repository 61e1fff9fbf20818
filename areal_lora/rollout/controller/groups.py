"""One prompt group in the controller: issued, scored, leased."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from areal_lora.data.prompts import Prompt
from areal_lora.errors import RolloutError, UserCodeError
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import Episode
from areal_lora.types import Cause, TrajectoryGroup


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One issued group. ``version`` is None while the group waits for a retry.

    ``failed`` tries count towards `retries.MAX_TRIES`. ``resampled`` of them failed because of the answer itself, so
    the next try samples another answer. ``birth`` counts the rebuilds of the ledger before the issue: keys repeat after
    one.
    """

    seq: int
    prompt: Prompt
    issue: int
    birth: int = 0
    stale: int = 0
    failed: int = 0
    resampled: int = 0
    version: int | None = None
    begun_s: float = 0.0
    deadline: float = 0.0

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
class GroupTally:
    """Groups of this process that are not in flight any more: ``answered`` of the ``ended`` ones.

    ``tokens`` are those of the answers that may be trained on.
    """

    ended: int = 0
    answered: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The groups of one step, handed to the trainer and not yet committed."""

    step: int
    finished: tuple[ScoredGroup, ...]
    snapshot: bytes

    @property
    def groups(self) -> tuple[TrajectoryGroup, ...]:
        return tuple(finished.episode.group for finished in self.finished)


MAX_TRIES = 8  # requests of one issue
CODE_TRIES = 3  # of one whose answers user code fails on: another answer may pass, time changes nothing
MIN_LOST_IN_A_ROW = 16
BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0
UNSERVED_WAIT_S, UNSERVED_S = 0.2, 300.0
USER_CODE = (FaultKind.SCORER, FaultKind.ENVIRONMENT, FaultKind.AGENT, FaultKind.WORKFLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """``failed`` is the new count of failed tries. ``wait_s`` precedes the next one; None: the group is dropped."""

    failed: int
    wait_s: float | None


def decide(failure: GenerationFault, *, failed: int, unserved_s: float) -> Retry:
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

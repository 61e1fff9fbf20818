"""One prompt group in the controller: issued, scored, leased."""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.workflow import Episode
from areal_lora.types import TrajectoryGroup


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

"""One prompt group on its way through the controller, as the feed holds it."""

from __future__ import annotations

from dataclasses import dataclass

from areal_lora.rollout.controller.prompts import Prompt
from areal_lora.rollout.workflow import Episode
from areal_lora.types import TrajectoryGroup


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One issued group. ``version`` is None while it waits for a retry.

    ``failed`` tries count towards the feed's ``MAX_TRIES``; after ``resampled`` of them the answer itself was at
    fault, so another one is sampled.
    """

    seq: int
    prompt: Prompt
    issue: int
    stale: int = 0
    failed: int = 0
    resampled: int = 0
    version: int | None = None
    begun_s: float = 0.0
    deadline: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A scored group; ``oldest`` and ``newest`` are the versions of its tokens."""

    ticket: Ticket
    episode: Episode
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The groups of one step, handed over and not yet known to be committed."""

    step: int
    finished: tuple[Finished, ...]
    snapshot: bytes

    @property
    def groups(self) -> tuple[TrajectoryGroup, ...]:
        return tuple(finished.episode.group for finished in self.finished)

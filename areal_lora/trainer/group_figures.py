"""What the rewards of a batch say about its groups: a group whose rewards are all equal teaches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """Shares of the sampled groups of a batch; None where there are none.

    ``all_right`` and ``all_wrong`` are of the groups in which every answer's correctness is known.
    """

    equal: float | None = None
    all_right: float | None = None
    all_wrong: float | None = None


def group_figures(groups: Sequence[TrajectoryGroup]) -> GroupFigures:
    """The figures of ``groups``; given answers are not sampled, and left out."""
    sampled = [group.trajectories for group in groups if not any(t.given for t in group.trajectories)]
    judged = [{t.correct for t in group} for group in sampled if all(t.correct is not None for t in group)]
    return GroupFigures(
        equal=_share([len({t.reward for t in group}) == 1 for group in sampled]),
        all_right=_share([correct == {True} for correct in judged]),
        all_wrong=_share([correct == {False} for correct in judged]),
    )


def _share(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None

"""What the scores of an evaluation add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.tasks.scorer import Score
from areal_lora.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Of ``n`` answers ``unscored`` could not be scored and ``ungraded`` have a reward, but no grade.

    ``accuracy`` is the fraction of all ``n`` that is correct; None while any is ungraded. ``reward_mean`` is over the
    scored ones; None if there are none.
    """

    n: int
    unscored: int
    ungraded: int
    accuracy: float | None
    reward_mean: float | None


def tally(scores: Sequence[Score]) -> Tally:
    """An answer that could not be scored is not correct, and has no reward (contract C8)."""
    scored = [score for score in scores if score.outcome is Outcome.OK]
    ungraded = sum(score.correct is None for score in scored)
    correct = sum(score.correct is True for score in scored)
    return Tally(
        n=len(scores),
        unscored=len(scores) - len(scored),
        ungraded=ungraded,
        accuracy=correct / len(scores) if scores and not ungraded else None,
        reward_mean=sum(score.reward for score in scored) / len(scored) if scored else None,
    )

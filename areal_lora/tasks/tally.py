"""Summarize the scores of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.tasks.scorer import Score
from areal_lora.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Summary of ``n`` answers: ``unscored`` could not be scored, ``ungraded`` have a reward but no grade.

    ``accuracy`` is the fraction of all ``n`` answers that are correct; None if any is ungraded. ``reward_mean`` is the
    mean over the scored answers; None if there are none.
    """

    n: int
    unscored: int
    ungraded: int
    accuracy: float | None
    reward_mean: float | None


def tally(scores: Sequence[Score]) -> Tally:
    """Summarize ``scores``. An unscored answer is not correct and has no reward (contract C8)."""
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

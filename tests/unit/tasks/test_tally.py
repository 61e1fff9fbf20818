from __future__ import annotations

import math

import pytest

from areal_lora.tasks.reward_calls import Score
from areal_lora.tasks.tally import Answer, estimate
from areal_lora.types import Outcome

LOST = Score(reward=math.nan, outcome=Outcome.TIMEOUT, detail="scoring took longer than 5 s")


def scored(reward: float, correct: bool | None) -> Score:
    return Score(reward=reward, outcome=Outcome.OK, correct=correct)


@pytest.mark.parametrize(
    ("scores", "unscored", "ungraded", "accuracy", "reward_mean"),
    [
        ([scored(0.93, True)] * 64, 0, 0, 1.0, 0.93),  # shaped: no reward is 1
        ([scored(1.0, False), scored(-1.0, True)], 0, 0, 0.5, 0.0),
        ([scored(1.0, True), LOST, LOST, scored(0.0, False)], 2, 0, 0.25, 0.5),
        ([scored(0.25, None), scored(0.75, None), LOST], 1, 2, None, 0.5),
        ([scored(0.25, None), scored(0.75, True)], 0, 1, None, 0.5),
        ([LOST, LOST], 2, 0, 0.0, None),
    ],
)
def test_what_scores_add_up_to(
    scores: list[Score], unscored: int, ungraded: int, accuracy: float | None, reward_mean: float | None
) -> None:
    found = estimate([[Answer(text="", score=score)] for score in scores], "function")
    assert (found.unscored, found.ungraded, found.accuracy) == (unscored, ungraded, accuracy)
    assert found.reward_mean == (None if reward_mean is None else pytest.approx(reward_mean))

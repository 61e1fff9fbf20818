from __future__ import annotations

import math

import pytest

from areal_lora.tasks.reward_calls import Score
from areal_lora.tasks.tally import Tally, tally
from areal_lora.types import Outcome

LOST = Score(reward=math.nan, outcome=Outcome.TIMEOUT, detail="scoring took longer than 5 s")


def scored(reward: float, correct: bool | None) -> Score:
    return Score(reward=reward, outcome=Outcome.OK, correct=correct)


@pytest.mark.parametrize(
    ("scores", "n", "unscored", "ungraded", "accuracy", "reward_mean"),
    [
        ([scored(0.93, True)] * 64, 64, 0, 0, 1.0, 0.93),  # shaped: no reward is 1
        ([scored(1.0, False), scored(-1.0, True)], 2, 0, 0, 0.5, 0.0),
        ([scored(1.0, True), LOST, LOST, scored(0.0, False)], 4, 2, 0, 0.25, 0.5),
        ([scored(0.25, None), scored(0.75, None), LOST], 3, 1, 2, None, 0.5),
        ([scored(0.25, None), scored(0.75, True)], 2, 0, 1, None, 0.5),
        ([LOST, LOST], 2, 2, 0, 0.0, None),
        ([], 0, 0, 0, None, None),
    ],
)
def test_what_scores_add_up_to(
    scores: list[Score], n: int, unscored: int, ungraded: int, accuracy: float | None, reward_mean: float | None
) -> None:
    assert tally(scores) == Tally(
        n=n,
        unscored=unscored,
        ungraded=ungraded,
        accuracy=accuracy,
        reward_mean=None if reward_mean is None else pytest.approx(reward_mean),
    )

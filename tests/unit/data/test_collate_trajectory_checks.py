"""Trajectories that contradict themselves are refused before anything is packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal_lora.data.trajectory_checks import check_alignment, check_rewards
from areal_lora.errors import AlignmentError
from areal_lora.types import AdapterRef, Trajectory

GOOD = Trajectory(
    uid="a",
    sample=0,
    adapter=AdapterRef(name="math", version=4),
    token_ids=[1, 2, 3],
    loss_mask=[0, 1, 1],
    rollout_logprobs=[0.0, -0.1, -0.2],
    versions=[-1, 4, 4],
    reward=1.0,
)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rollout_logprobs": [0.0]}, "differ in length"),
        ({"loss_mask": [1, 1, 1], "versions": [4, 4, 4]}, "entry 0"),
        ({"loss_mask": [0, 1, 0]}, "versions and loss_mask disagree"),
    ],
)
def test_arrays_that_do_not_line_up_are_refused(wrong: dict[str, Any], reason: str) -> None:
    check_alignment(GOOD)
    with pytest.raises(AlignmentError, match=reason):
        check_alignment(replace(GOOD, **wrong))


def test_one_sample_has_one_reward() -> None:
    other = replace(GOOD, uid="b", reward=0.5)
    check_rewards([(0, GOOD), (1, other), (0, replace(other, sample=1))])
    with pytest.raises(AlignmentError, match=r"trajectory b: reward 0\.5, another one of its sample has 1\.0"):
        check_rewards([(0, GOOD), (0, other)])

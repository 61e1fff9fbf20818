"""Trajectories that contradict themselves are refused before anything is packed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_lora.data.packed_groups import check_alignment, check_rewards
from areal_lora.errors import AlignmentError
from areal_lora.types import AdapterRef, TokenColumns, Trajectory

GOOD = Trajectory(
    uid="a",
    sample=0,
    adapter=AdapterRef(name="math", version=4),
    columns=TokenColumns.of([1, 2, 3], [0.0, -0.1, -0.2], [-1, 4, 4]),
    reward=1.0,
)


def test_a_trajectory_that_starts_with_a_sampled_token_is_refused() -> None:
    check_alignment(GOOD)
    for columns in (TokenColumns.of([1, 2], [-0.1, -0.2], [4, 4]), TokenColumns.of([], [], [])):
        with pytest.raises(AlignmentError, match="entry 0"):
            check_alignment(replace(GOOD, columns=columns))
    for at in (-1, len(GOOD.columns)):
        with pytest.raises(AlignmentError, match="a turn with a reward ends beyond"):
            check_alignment(replace(GOOD, turn_rewards=((at, 1.0),)))
    check_alignment(replace(GOOD, turn_rewards=((len(GOOD.columns) - 1, 1.0),)))


def test_one_sample_has_one_reward() -> None:
    other = replace(GOOD, uid="b", reward=0.5)
    check_rewards([(0, GOOD), (1, other), (0, replace(other, sample=1))])
    with pytest.raises(AlignmentError, match=r"trajectory b: reward 0\.5, another one of its sample has 1\.0"):
        check_rewards([(0, GOOD), (0, other)])

"""How ``benchmarks/async_overlap.py`` balances its load, on points written by hand."""

from __future__ import annotations

import async_overlap
import pytest


@pytest.mark.parametrize(
    ("surplus", "length"),
    [
        ([-0.2, 0.2, 0.3], 90),
        ([-0.3, -0.1, 0.1], 150),
        ([0.3, 0.1, 0.2], 120),
        ([-0.3, -0.2, -0.1], 180),
        ([-0.1, 0.0, 0.3], 120),
    ],
)
def test_the_length_at_which_both_sides_are_equal_or_nearest(surplus: list[float], length: int) -> None:
    assert async_overlap.balanced_at((60, 120, 180), surplus) == length

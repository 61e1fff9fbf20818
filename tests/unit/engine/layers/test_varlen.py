"""Attention of runs over runs in padded blocks, against each run by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_lora.engine.layers import varlen
from areal_lora.engine.layers.varlen import VarlenRuns
from tests.support.engine.layers import plain_attention

CPU = torch.device("cpu")
LENGTHS = np.array([100, 60, 50, 20, 3])


def test_blocks_hold_runs_of_similar_length() -> None:
    """A long answer does not pad the short ones beyond twice their length."""
    blocks = VarlenRuns(LENGTHS, LENGTHS + np.array([4, 9, 4, 1, 2]), CPU).blocks
    shapes = [(tuple(b.queries.shape), tuple(b.keys.shape)) for b in blocks]
    assert shapes == [((3, 100), (3, 104)), ((1, 20), (1, 21)), ((1, 3), (1, 5))]
    assert [b.n_q.tolist() for b in blocks] == [[100, 60, 50], [20], [3]]


@pytest.mark.parametrize(("before", "window"), [(0, None), (0, 7), (11, 7), (11, 200)])
def test_padded_blocks_equal_runs(before: int, window: int | None) -> None:
    torch.manual_seed(5)
    print("seed 5")
    at = VarlenRuns(LENGTHS, LENGTHS + before, CPU)
    q = torch.randn(int(LENGTHS.sum()), 4, 8)
    k, v = (torch.randn(int(LENGTHS.sum()) + 5 * before, 2, 8) for _ in range(2))
    got = varlen.padded(at, q, k, v, scale=0.2, window=window)
    exact = [x.double() for x in (q, k, v)]
    want, _, _ = plain_attention.forward(at, *exact, causal=True, scale=0.2, window=window)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)

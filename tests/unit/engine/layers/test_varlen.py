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
    blocks, _ = VarlenRuns(LENGTHS, LENGTHS + np.array([4, 9, 4, 1, 2]), CPU).blocks
    shapes = [(tuple(b.queries.shape), tuple(b.keys.shape)) for b in blocks]
    assert shapes == [((3, 100), (3, 104)), ((1, 20), (1, 21)), ((1, 3), (1, 5))]
    assert [b.n_q.tolist() for b in blocks] == [[100, 60, 50], [20], [3]]


def test_only_blocks_with_keys_before_their_queries_have_a_mask() -> None:
    """Starts and sequences by themselves are causal: no mask is made, and none widens another block."""
    blocks, places = VarlenRuns(LENGTHS, LENGTHS + np.array([0, 9, 0, 0, 2]), CPU).blocks
    masks = [b.mask(None, torch.float32) for b in blocks]
    assert [b.n_q.tolist() for b in blocks] == [[100, 50], [20], [60], [3]]
    assert [mask is None for mask in masks] == [True, True, False, False]
    assert blocks[0].mask(7, torch.float32) is not None, "a window"
    assert places[:100].tolist() == list(range(100))
    assert places[-3:].tolist() == [280, 281, 282]


@pytest.mark.parametrize(
    ("before", "window"),
    [([0] * 5, None), ([11, 0, 3, 0, 0], None), ([0] * 5, 7), ([11] * 5, 7), ([11] * 5, 200), ([0, 50, 0, 3, 0], 7)],
)
def test_padded_blocks_equal_runs(before: list[int], window: int | None) -> None:
    """Also where the padding of a run would see no key of its block."""
    torch.manual_seed(5)
    print("seed 5")
    lengths = LENGTHS + np.array(before)
    at = VarlenRuns(LENGTHS, lengths, CPU)
    shapes = ((LENGTHS.sum(), 4), (lengths.sum(), 2), (lengths.sum(), 2))
    inputs = [torch.randn(int(n), heads, 8).requires_grad_() for n, heads in shapes]
    got = varlen.padded(at, *inputs, scale=0.2, window=window)
    d_out = torch.randn_like(got)
    gradients = torch.autograd.grad(got, inputs, d_out)
    q, k, v = exact = tuple(x.detach().double() for x in inputs)
    how = {"causal": True, "scale": 0.2, "window": window}
    want, lse, saved = plain_attention.forward(at, q, k, v, **how)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    expected = plain_attention.backward(at, d_out.double(), exact, want, lse, saved, **how)
    for gradient, one in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), one, atol=2e-5, rtol=0)

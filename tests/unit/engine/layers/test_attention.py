"""Attention with a sliding window over token trees against a loop over whole sequences in float64."""

from __future__ import annotations

import pytest
import torch

from areal_lora.data.collate import MicroPlan, Tree
from areal_lora.engine.layers.attention import attend, pack
from tests.support.distributed.engine_ranks import make_batch

ROWS = [[7] * 9 + [1, 2], [7] * 9 + [3], [7] * 9 + [4, 5, 6, 7, 8], [9, 9, 1], [5] * 23, [2]]
TREES = (Tree(sequences=(0, 1, 2), shared=9), *(Tree(sequences=(i,), shared=0) for i in (3, 4, 5)))
HEADS, GROUPS, WIDTH, VALUES = 4, 2, 8, 6


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_a_token_sees_its_own_sequence_as_far_as_the_window(window: int | None) -> None:
    torch.manual_seed(3)
    n = sum(tree.size([len(row) for row in ROWS]) for tree in TREES)
    packed = pack(make_batch(ROWS), MicroPlan(trees=(TREES,), n_tokens=n + 3), 0, torch.device("cpu"))
    q, k, v = (torch.randn(n + 3, *shape) for shape in ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES)))
    found = attend(packed.attention, q, k, v, scale=0.3, window=window).view(n + 3, HEADS, VALUES).double()
    assert not found[n:].any()
    at = 0
    for tree in TREES:
        shared = list(range(at, at + tree.shared))
        at += tree.shared
        for row in tree.sequences:
            own = len(ROWS[row]) - tree.shared
            places = [*shared, *range(at, at + own)]
            at += own
            for i, place in enumerate(places):
                seen = places[max(0, i + 1 - (window or i + 1)) : i + 1]
                for head in range(HEADS):
                    keys, values = k[seen, head // 2].double(), v[seen, head // 2].double()
                    want = (0.3 * keys @ q[place, head].double()).softmax(0) @ values
                    torch.testing.assert_close(found[place, head], want, atol=1e-5, rtol=0)


def test_gradients_pass_through_padding_alone() -> None:
    """As on a rank without sequences: FSDP's collectives follow the backward pass, which all ranks take alike."""
    packed = pack(make_batch(ROWS), MicroPlan(trees=((),), n_tokens=3), 0, torch.device("cpu"))
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES))
    q, k, v = (torch.randn(3, *shape, requires_grad=True) for shape in shapes)
    found = attend(packed.attention, q, k, v)
    assert not found.any()
    for gradient in torch.autograd.grad(found.sum(), (q, k, v)):
        assert not gradient.any()

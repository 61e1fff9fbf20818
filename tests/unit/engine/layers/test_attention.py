"""Attention over token trees, also with a sliding window, against a loop over whole sequences in float64."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_lora.data.collate import MicroPlan, Tree
from areal_lora.engine.layers.attention import AttentionPlan, Segment, attend, pack, rotate
from tests.support.distributed.engine_ranks import make_batch
from tests.support.engine.layers import plain_attention

ROWS = [[7] * 9 + [1, 2], [7] * 9 + [3], [7] * 9 + [4, 5, 6, 7, 8], [9, 9, 1], [5] * 23, [2]]
TREES = (Tree(sequences=(0, 1, 2), shared=9), *(Tree(sequences=(i,), shared=0) for i in (3, 4, 5)))
HEADS, GROUPS, WIDTH, VALUES = 4, 2, 8, 6


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_a_token_sees_its_own_sequence_as_far_as_the_window(
    window: int | None, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flash:
        plain_attention.install(monkeypatch)
    torch.manual_seed(3)
    n = sum(tree.size([len(row) for row in ROWS]) for tree in TREES)
    packed = pack(make_batch(ROWS), MicroPlan(trees=(TREES,), n_tokens=n + 3), 0, torch.device("cpu"))
    q, k, v = (torch.randn(n + 3, *shape) for shape in ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES)))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = attend(packed.attention, q, k, v, scale=0.3, window=window).view(n + 3, HEADS, VALUES).double()
    assert not found[n:].any()
    factors, total = torch.randn(found.shape).double(), torch.zeros((), dtype=torch.float64)
    gradients = torch.autograd.grad((found[:n] * factors[:n]).sum(), inputs)
    q, k, v = exact = [x.detach().double().requires_grad_() for x in inputs]
    at = 0
    for tree in TREES:
        shared = list(range(at, at + tree.shared))
        at += tree.shared
        for row in tree.sequences:
            own = len(ROWS[row]) - tree.shared
            places = [*shared, *range(at, at + own)]
            at += own
            # A shared token counts once.
            for i, place in list(enumerate(places))[0 if row == tree.sequences[0] else tree.shared :]:
                seen = places[max(0, i + 1 - (window or i + 1)) : i + 1]
                for head in range(HEADS):
                    keys, values = k[seen, head // 2], v[seen, head // 2]
                    want = (0.3 * keys @ q[place, head]).softmax(0) @ values
                    torch.testing.assert_close(found[place, head], want, atol=1e-5, rtol=0)
                    total = total + (want * factors[place, head]).sum()
    for got, expected in zip(gradients, torch.autograd.grad(total, exact), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=0)


def test_gradients_pass_through_padding_alone() -> None:
    """As on a rank without sequences: FSDP's collectives follow the backward pass, which all ranks take alike."""
    packed = pack(make_batch(ROWS), MicroPlan(trees=((),), n_tokens=3), 0, torch.device("cpu"))
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES))
    q, k, v = (torch.randn(3, *shape, requires_grad=True) for shape in shapes)
    found = attend(packed.attention, q, k, v)
    assert not found.any()
    for gradient in torch.autograd.grad(found.sum(), (q, k, v)):
        assert not gradient.any()


def test_a_gpu_launches_flash_attention_once_a_part_and_nothing_has_tokens_times_tokens() -> None:
    """Real widths on ``meta``: three answers of 8 k after 512 shared tokens."""
    sizes: list[int] = []
    names: Counter[str] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            names[func._opname] += 1
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    segments = [Segment(start=0, own=512)]
    segments += [Segment(start=512 + 8000 * i, own=8000, shared_start=0, shared=512) for i in range(3)]
    plan = AttentionPlan(segments, 24520, torch.device("meta"))
    q, *kv = (torch.empty(24520, n, 128, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (32, 4, 4))
    with Watch():
        attend(plan, q, *kv).sum().backward()
        assert (names["_flash_attention_forward"], names["_flash_attention_backward"]) == (2, 2)
        names.clear()
        attend(plan, q, *kv, window=1024).sum().backward()
        assert (names["_flash_attention_forward"], names["_flash_attention_backward"]) == (1, 1)
    assert max(sizes) == q.numel()
    assert names.total() < 60


def test_heads_are_rotated_by_the_angles_of_their_positions() -> None:
    torch.manual_seed(6)
    print("seed 6")
    query, key, half = torch.randn(5, 3, 8), torch.randn(5, 2, 8), torch.rand(5, 4)
    angles = half.repeat(1, 2)
    weights = torch.randn(5, 5, 8)
    query.requires_grad_()
    key.requires_grad_()
    found = torch.cat(rotate(query, key, angles.cos(), angles.sin()), dim=1)
    (found * weights).sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    found, gradients = found.detach(), torch.cat([query.grad, key.grad], dim=1)
    heads = torch.cat([query, key], dim=1).detach()
    for t, h, j in itertools.product(range(5), range(5), range(4)):
        turn = complex(math.cos(half[t, j]), math.sin(half[t, j]))
        for values, rotated, factor in ((heads, found, turn), (weights, gradients, turn.conjugate())):
            want = complex(values[t, h, j], values[t, h, j + 4]) * factor
            assert abs(complex(rotated[t, h, j], rotated[t, h, j + 4]) - want) < 1e-6

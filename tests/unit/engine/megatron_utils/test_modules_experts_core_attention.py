"""Packed attention against a loop over whole sequences in float64: values, gradients, padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from areal_lora.data.collate import MicroPlan, Tree
from areal_lora.engine.layers.attention import AttentionPlan, Segment, pack
from tests.support.distributed.engine_ranks import make_batch
from tests.support.engine.layers import plain_attention
from tests.support.lazy import Lazy

modules = Lazy("areal_lora.engine.megatron_utils.modules")
pytestmark = pytest.mark.usefixtures("cpu_patches")

CPU = torch.device("cpu")
WIDTH, HEADS, GROUPS = 8, 4, 2
ROWS = [[7] * 9 + [1, 2], [7] * 9 + [3], [7] * 9 + [4, 5, 6, 7, 8], [9, 9, 1], [5] * 23, [2]]
TREES = (Tree(sequences=(0, 1, 2), shared=9), *(Tree(sequences=(i,), shared=0) for i in (3, 4, 5)))
INV_FREQ = 100.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)


def rotated(x: Tensor) -> Tensor:
    """x [n, heads, width] turned by its positions, pair by pair (i, i + width / 2)."""
    out = torch.empty_like(x)
    for position in range(x.shape[0]):
        for i in range(WIDTH // 2):
            angle = torch.tensor(position, dtype=torch.float32) * INV_FREQ[i]
            c, s = angle.cos().double(), angle.sin().double()
            first, second = x[position, :, i], x[position, :, i + WIDTH // 2]
            out[position, :, i] = first * c - second * s
            out[position, :, i + WIDTH // 2] = second * c + first * s
    return out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one whole sequence, head by head."""
    q, k = rotated(q), rotated(k)
    out = torch.empty(q.shape[0], HEADS * WIDTH, dtype=q.dtype)
    for h in range(HEADS):
        scores = q[:, h] @ k[:, h // (HEADS // GROUPS)].t() / WIDTH**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        out[:, h * WIDTH : (h + 1) * WIDTH] = scores.softmax(-1) @ v[:, h // (HEADS // GROUPS)]
    return out


def random_inputs(n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    print(f"seed {seed}")
    shapes = ((n, 1, HEADS, WIDTH), (n, 1, GROUPS, WIDTH), (n, 1, GROUPS, WIDTH))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("flash", [False, True])
def test_packed_trees_equal_whole_sequences(padding: int, flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if flash:
        plain_attention.install(monkeypatch)
    n_tokens = 9 + 2 + 1 + 5 + 3 + 23 + 1 + padding
    packed = pack(make_batch(ROWS), MicroPlan(trees=(TREES,), n_tokens=n_tokens), 0, CPU)
    core, packing = modules.PackedAttention(None), modules.Packing(INV_FREQ, torch.float32)
    core.packing = packing
    q, k, v = random_inputs(n_tokens, seed=3)
    out = core(q, k, v, packing.add(packed.attention, packed.tokens))
    assert out.shape == (n_tokens, 1, HEADS * WIDTH)
    assert not out[n_tokens - padding :].any()

    # Where the tokens of each whole sequence stand in the row.
    places = [[*range(9), 9, 10], [*range(9), 11], [*range(9), *range(12, 17)]]
    places += [[*range(17, 20)], [*range(20, 43)], [43]]
    exact = [x.detach().double()[:, 0].requires_grad_() for x in (q, k, v)]
    weights = torch.randn(out.shape[0], HEADS * WIDTH, generator=torch.Generator().manual_seed(4)).double()
    loss = torch.zeros((), dtype=torch.float64)
    for number, place in enumerate(places):
        whole = attend(*(x[place] for x in exact))
        own = slice(9, None) if number < 3 else slice(None)
        torch.testing.assert_close(out[place, 0].double(), whole, rtol=0, atol=1e-5)
        # The shared start counts once, with its first sequence.
        counted = slice(None) if number == 0 else own
        loss = loss + (whole * weights[place])[counted].sum()
    loss.backward()
    real = n_tokens - padding
    (out[:real, 0] * weights[:real].float()).sum().backward()
    for got, want in zip((q, k, v), exact, strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad[:, 0].double(), want.grad, rtol=0, atol=2e-5)


def test_recomputation_finds_the_plan_of_its_micro_batch() -> None:
    packing = modules.Packing(INV_FREQ, torch.float32)
    first, second = (AttentionPlan([Segment(start=0, own=n)], n, CPU) for n in (3, 4))
    keys = [torch.zeros(n, dtype=torch.int64) for n in (3, 4)]
    numbers = packing.add(first, keys[0]), packing.add(second, keys[1])
    assert packing.plan(numbers[0])[0] is first
    assert packing.plan(numbers[1])[0] is second
    packing.keep(1)
    assert packing.plan(numbers[1])[0] is second
    with pytest.raises(KeyError):
        packing.plan(numbers[0])
    third = packing.add(first, keys[0])
    assert (packing.plan(numbers[1])[0], packing.plan(third)[0]) == (second, first), "numbers are not given out again"

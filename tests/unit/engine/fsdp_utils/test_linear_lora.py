"""The adapter of projections with one input."""

from __future__ import annotations

import pytest
import torch

from areal_lora.config.models import TrainerConfig
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.fsdp_utils.linear_lora import LinearLora, SharedInput
from areal_lora.engine.layers.expert_mlp import ActiveAdapter, Dropout
from areal_lora.types import AdapterSpec
from tests.support.families.shapes import make_shape

SHAPE = make_shape("qwen3", layers=1, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=8)
SPEC = AdapterSpec(name="a", base_model="m", rank=3, alpha=6.0, target_modules=("linear_qkv",))


@pytest.mark.parametrize("dropout", [None, Dropout(rate=0.4, seed=7)])
def test_projections_share_a_product_and_their_rows_lie_apart(dropout: Dropout | None) -> None:
    """Against the formula in float64 with matrices cut by hand, in two passes whose gradients add up."""
    print("seed 5")
    draw = torch.Generator().manual_seed(5)
    layout = ParallelLayout.of(TrainerConfig(world_size=1), layers=1, experts=0)
    sharded = ShardedModel(shape=SHAPE, layout=layout)
    memory = AdapterMemory(sharded, SPEC, 0, torch.device("cpu"))
    memory.weights.copy_(torch.randn(memory.arena.size, generator=draw))
    (bank,) = memory.arena.banks
    pieces, (a, b) = sharded.pieces(bank.keys[0]), memory.parameters(bank, 0)
    shared, active = SharedInput(a, 11, len(pieces)), ActiveAdapter()
    active.dropout, active.keys = dropout, torch.arange(5)
    loras = [LinearLora.of(memory, bank, piece.rows, shared, 2.0) for piece in pieces]
    exact_a, exact_b = (x.detach().double().requires_grad_() for x in (a, b))
    for _ in range(2):
        x = torch.randn(5, 16, generator=draw, requires_grad=True)
        exact_x = x.detach().double().requires_grad_()
        kept = exact_x if dropout is None else exact_x * dropout.keep(active.keys, 11, 16)
        for piece, lora in zip(pieces, loras, strict=True):
            rows = torch.cat([exact_b[start:stop] for start, stop in piece.rows])
            base, slopes = (torch.randn(5, len(rows), generator=draw) for _ in range(2))
            wanted = base.double() + 2.0 * active.factor * kept @ exact_a.t() @ rows.t()
            found = lora.add_to(base.clone(), x, active)
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
            (found * slopes).sum().backward(retain_graph=True)
            (wanted * slopes).sum().backward(retain_graph=True)
        assert shared._known is None, "it would keep the pass alive"
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), exact_x.grad, atol=1e-5, rtol=1e-5)
    for found, exact in ((a.grad, exact_a.grad), (b.grad, exact_b.grad)):
        assert found is not None
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5)

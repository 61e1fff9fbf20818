"""Norms that torch's kernel may compute; the adapter of projections with one input."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from areal_lora.config.models import TrainerConfig
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.fsdp_utils import model
from areal_lora.engine.layers.expert_mlp import ActiveAdapter, Dropout
from areal_lora.types import AdapterSpec
from tests.support.families.shapes import make_shape


def test_norms_with_the_usual_formula_are_fused() -> None:
    """Gemma's has other parts, as has one with a gate; one may also have the same parts and other values."""

    class Shifted(Qwen3MoeRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 1.0

    torch.manual_seed(3)
    print("seed 3")
    x = torch.randn(5, 16)
    layers = nn.ModuleList([Qwen3MoeRMSNorm(16), GemmaRMSNorm(16), Qwen3MoeRMSNorm(16), Shifted(16)])
    for norm in layers:
        nn.init.normal_(norm.weight)
    layers[2].gate = nn.Linear(16, 16)
    before = [norm(x) for norm in layers]
    model.fuse_norms(layers)
    assert ["forward" in vars(norm) for norm in layers] == [True, False, False, False]
    for norm, values in zip(layers, before, strict=True):
        torch.testing.assert_close(norm(x), values, atol=1e-6, rtol=1e-6)


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
    shared, active = model.SharedInput(a, 11, len(pieces)), ActiveAdapter()
    active.dropout, active.keys = dropout, torch.arange(5)
    loras = []
    for piece in pieces:
        values, grad = memory.rows_of_b(bank, piece.rows)
        loras.append(model.LinearLora(shared=shared, lora_b=values, grad=grad, scale=2.0))
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

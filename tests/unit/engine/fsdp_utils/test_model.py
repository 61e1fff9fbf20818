"""What a model is gathered in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeRMSNorm

from areal_lora.engine.fsdp_utils import model

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}


def units(layer: nn.Module) -> list[str]:
    names = {part: name for name, part in layer.named_modules()}
    return [names[unit] for unit in model.units_of(layer)]


def llama(width: int) -> nn.Module:
    with torch.device("meta"):
        return LlamaDecoderLayer(LlamaConfig(**SIZES, intermediate_size=width), 0)


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


def test_a_small_layer_is_one_unit() -> None:
    assert units(llama(512)) == [""]


def test_a_large_layer_is_its_large_parts_and_what_remains() -> None:
    assert units(llama(2048)) == ["self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp", ""]


def test_small_parts_stay_with_the_layer() -> None:
    with torch.device("meta"):
        layer = Qwen3MoeDecoderLayer(Qwen3MoeConfig(**SIZES), 0)
    assert units(layer) == ["self_attn", "mlp.experts", "mlp", ""], "router and norms"


def test_the_modules_of_a_list_are_units_and_the_list_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "UNIT_BYTES", 1024)
    parts = nn.Module()
    parts.one, parts.many = nn.Linear(8, 8), nn.ModuleList([nn.Linear(32, 32), nn.Linear(64, 64)])
    assert units(parts) == ["one", "many.0", "many.1", ""]

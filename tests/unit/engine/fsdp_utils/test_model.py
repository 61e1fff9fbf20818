"""Norms that torch's kernel may compute."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from areal_lora.engine.fsdp_utils import model


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

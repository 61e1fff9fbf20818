"""Norms, rotations and MLPs that our functions may compute."""

from __future__ import annotations

import torch
from torch import nn
from transformers import CohereConfig, GlmConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRMSNorm

from areal_lora.engine.fsdp_utils import fused


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
    fused.fuse_norms(layers)
    assert ["forward" in vars(norm) for norm in layers] == [True, False, False, False]
    for norm, values in zip(layers, before, strict=True):
        torch.testing.assert_close(norm(x), values, atol=1e-6, rtol=1e-6)


def test_gated_mlps_keep_three_tensors_and_every_bit() -> None:
    """In bfloat16, forward and backward; others have another activation, a factor, or a limit."""

    class Scaled(Qwen3MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(x)

    class Clamped(Qwen3MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10.0)) * self.up_proj(x).clamp(-10.0, 10.0))

    torch.manual_seed(5)
    print("seed 5")
    config = Qwen3Config(hidden_size=16, intermediate_size=24)
    others = [Scaled(config), Clamped(config), Qwen3MLP(Qwen3Config(hidden_act="gelu"))]
    layers = nn.ModuleList([Qwen3MLP(config), *others]).bfloat16()
    layers.requires_grad_(False)
    x, weights = torch.randn(2, 1, 7, 16).bfloat16()
    x.requires_grad_()

    def results() -> tuple[list[torch.Tensor], int]:
        kept = list[torch.Tensor]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = layers[0](x)
        places = {t.data_ptr() for t in kept if t.shape[-1] == 24 and t.shape[:-1].numel() == 7}
        return [out, *torch.autograd.grad((out * weights).sum(), x)], len(places)

    before, four = results()
    state = torch.get_rng_state()
    fused.fuse_mlps(layers)
    assert torch.equal(torch.get_rng_state(), state)
    assert ["forward" in vars(layer) for layer in layers] == [True, False, False, False]
    after, fewer = results()
    assert all(map(torch.equal, after, before))
    assert four - fewer == 1


def test_the_usual_rotation_is_fused_in_this_model_alone() -> None:
    """Cohere's and GLM's are of interleaved features."""
    torch.manual_seed(4)
    print("seed 4")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}

    def config_of(kind: type[PretrainedConfig]) -> PretrainedConfig:
        config = kind(**sizes)
        config._attn_implementation = "eager"
        return config

    layers = nn.ModuleList(
        [
            Qwen3MoeAttention(config_of(Qwen3MoeConfig), 0),
            CohereAttention(config_of(CohereConfig), 0),
            GlmAttention(config_of(GlmConfig), 0),
        ]
    )
    other = Qwen3MoeAttention(config_of(Qwen3MoeConfig), 0)
    other.load_state_dict(layers[0].state_dict())
    fused.fuse_rotations(layers)
    assert ["forward" in vars(layer) for layer in layers] == [True, False, False]
    own = modeling_qwen3_moe.apply_rotary_pos_emb
    assert "forward" not in vars(other)
    assert other.forward.__func__.__globals__["apply_rotary_pos_emb"] is own

    angles = torch.rand(1, 5, 4).repeat(1, 1, 2)
    x = torch.randn(1, 5, 24, requires_grad=True)
    weights = torch.randn(1, 5, 24)
    gradients = []
    for layer in (layers[0], other):
        out, _ = layer(x, (angles.cos(), angles.sin()), None)
        gradients += [out, *torch.autograd.grad((out * weights).sum(), x)]
    for got, want in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)

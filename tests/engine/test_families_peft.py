"""A converted adapter in stock PEFT on transformers equals the base with the adapter's products added to it.

The other side knows nothing of the converter: the fused products are reshaped as Megatron's attention
reshapes its linear_qkv ([groups, queries + key + value, head]), and the names are written down here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_lora.checkpoint.adapter_io import save_peft
from areal_lora.config.architectures import read_hf_config
from areal_lora.engine.megatron_utils.convert import FAMILIES
from areal_lora.engine.megatron_utils.convert.registry import Dims, Scope, SiteKey, spec_covers, to_hf, wire_names
from areal_lora.types import AdapterSpec, ExpertLayout

from .tiny_families import save

TOKENS = torch.arange(2, 34)[None]


def module_names(kind: str, dims: Dims, key: SiteKey) -> list[list[str]]:
    """Checkpoint modules of a site's parts; several where all experts share one adapter."""
    base = f"model.layers.{key.layer}"
    if key.linear == "linear_qkv":
        return [[f"{base}.self_attn.{c}_proj" for c in "qkv"]]
    if key.linear == "linear_proj":
        return [[f"{base}.self_attn.o_proj"]]
    parts = ["gate_proj", "up_proj"] if key.linear == "linear_fc1" else ["down_proj"]
    if key.scope is Scope.MLP:
        return [[f"{base}.mlp.{part}" for part in parts]]
    if key.scope is Scope.SHARED_EXPERT:
        return [[f"{base}.mlp.shared_expert.{part}" for part in parts]]
    mlp = "mlp"
    if kind == "mixtral":
        mlp, parts = "block_sparse_moe", ["w1", "w3"] if key.linear == "linear_fc1" else ["w2"]
    experts = range(dims.experts) if key.scope is Scope.ALL_EXPERTS else [key.expert]
    return [[f"{base}.{mlp}.experts.{e}.{part}" for part in parts] for e in experts]


def split(dims: Dims, key: SiteKey, product: Tensor) -> list[Tensor]:
    if key.linear == "linear_qkv":
        heads = product.view(dims.kv_heads, -1, dims.head_dim, dims.hidden)
        return [part.reshape(-1, dims.hidden) for part in (heads[:, :-2], heads[:, -2], heads[:, -1])]
    return list(product.chunk(2)) if key.linear == "linear_fc1" else [product]


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def check(kind: str, layout: ExpertLayout, spec: AdapterSpec, tmp_path: Path) -> None:
    base = save(kind, tmp_path)
    dims, family = Dims.from_hf(read_hf_config(base)), FAMILIES[kind]
    weights = load_file(base / "model.safetensors")
    torch.manual_seed(3)
    wire: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for key in family.sites(dims, range(3), layout):
        if not spec_covers(spec.target_modules, key):
            continue
        pieces = family.pieces(dims, key)
        a = torch.randn(spec.rank, pieces[0].in_features) * 0.3
        b = torch.randn(sum(p.out_features for p in pieces), spec.rank) * 0.3
        wire |= to_hf(pieces, a, b)
        aliases |= wire_names(pieces)[1]
        for modules in module_names(kind, dims, key):
            for module, part in zip(modules, split(dims, key, spec.scale * b @ a), strict=True):
                weights[f"{module}.weight"] += part
    adapter = tmp_path / "adapter"
    save_peft(adapter, spec, wire, str(base), aliases)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    through_peft = logits(PeftModel.from_pretrained(plain, adapter))
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    merged = logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert (merged - before).abs().max() > 0.1, "the adapter does something"
    torch.testing.assert_close(through_peft, merged, atol=2e-4, rtol=1e-4)


EVERYTHING = ("linear_fc1", "linear_fc2", "linear_proj", "linear_qkv")
# peft 0.21 on transformers 5 takes gate_proj, up_proj and down_proj of a mixture either as the experts' only
# (Qwen3-MoE) or as everything but the experts' (Qwen2-MoE).
ATTENTION = ("linear_proj", "linear_qkv")
EXPERTS = (*ATTENTION, "expert.linear_fc1", "expert.linear_fc2")
OTHERS = (*ATTENTION, "mlp.linear_fc1", "mlp.linear_fc2", "shared_expert.linear_fc1", "shared_expert.linear_fc2")
CASES = [
    ("llama", ExpertLayout.PER_EXPERT, EVERYTHING),
    ("qwen2", ExpertLayout.PER_EXPERT, EVERYTHING),
    ("qwen3", ExpertLayout.PER_EXPERT, EVERYTHING),
    ("qwen3", ExpertLayout.PER_EXPERT, ("linear_fc2", "linear_qkv")),
    ("mixtral", ExpertLayout.PER_EXPERT, EVERYTHING),
    ("mixtral", ExpertLayout.SHARED, EVERYTHING),
    ("qwen3_moe", ExpertLayout.PER_EXPERT, EXPERTS),
    ("qwen3_moe", ExpertLayout.SHARED, EXPERTS),
    ("qwen2_moe", ExpertLayout.PER_EXPERT, OTHERS),
]


@pytest.mark.parametrize(("kind", "layout", "targets"), CASES)
def test_peft_equals_the_merged_model(
    kind: str, layout: ExpertLayout, targets: tuple[str, ...], tmp_path: Path
) -> None:
    spec = AdapterSpec(name="a", base_model="m", rank=3, alpha=6.0, target_modules=targets, expert_layout=layout)
    check(kind, layout, spec, tmp_path)

"""A random adapter twice: as the converter's PEFT folder, and added to the weights of a checkpoint.

The second way knows nothing of the converter: the fused products are reshaped as Megatron's attention
reshapes its linear_qkv ([groups, queries + key + value, head]), and the names are written down here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal_lora.checkpoint.adapter_io import save_peft
from areal_lora.families.family import Scope
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.families.sites import SiteKey, pieces_of, sites_of, wire_names
from areal_lora.types import AdapterSpec
from tests.support.families.conversion import to_hf


@dataclass(frozen=True)
class Folders:
    base: Path
    adapter: Path
    merged: Path


Numbers = Callable[[str], tuple[int, float]]


def make(kind: str, base: Path, spec: AdapterSpec, size: float = 0.3, numbers: Numbers | None = None) -> Folders:
    """``size`` is the standard deviation of lora_A and lora_B; ``numbers`` gives the rank and scale of a module."""
    shape = ModelShape.from_hf(read_hf_config(base))
    weights = load_file(base / "model.safetensors")
    torch.manual_seed(3)
    wire: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for key in sites_of(shape, spec.expert_layout):
        if not key.covered(spec.target_modules):
            continue
        pieces = pieces_of(shape, key)
        rank, scale = numbers(pieces[0].name) if numbers else (spec.rank, spec.alpha / spec.rank)
        a = torch.randn(rank, pieces[0].in_features) * size
        b = torch.randn(sum(p.out_features for p in pieces), rank) * size
        wire |= to_hf(pieces, a, b)
        aliases |= wire_names(pieces)[1]
        for modules in _module_names(kind, shape, key):
            for module, part in zip(modules, _split(shape, key, scale * b @ a), strict=True):
                weights[f"{module}.weight"] += part
    folders = Folders(base=base, adapter=base.parent / "adapter", merged=base.parent / "merged")
    save_peft(folders.adapter, spec, wire, str(base), aliases)
    shutil.copytree(base, folders.merged)
    save_file(weights, folders.merged / "model.safetensors", metadata={"format": "pt"})
    return folders


def _module_names(kind: str, shape: ModelShape, key: SiteKey) -> list[list[str]]:
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
    experts = range(shape.experts) if key.scope is Scope.ALL_EXPERTS else [key.expert]
    return [[f"{base}.{mlp}.experts.{e}.{part}" for part in parts] for e in experts]


def _split(shape: ModelShape, key: SiteKey, product: Tensor) -> list[Tensor]:
    if key.linear == "linear_qkv":
        heads = product.view(shape.kv_heads, -1, shape.head_dim, shape.hidden)
        return [part.reshape(-1, shape.hidden) for part in (heads[:, :-2], heads[:, -2], heads[:, -1])]
    return list(product.chunk(2)) if key.linear == "linear_fc1" else [product]

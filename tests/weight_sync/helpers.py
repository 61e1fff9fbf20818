"""Small adapters with known values."""

from __future__ import annotations

import torch

from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync.buckets import PackBuffer
from areal_lora.weight_sync.manifest import build_manifest
from areal_lora.weight_sync.testing import moe_shapes

RUN, BASE, SECRET = "run-1", "base-digest", "5e" * 32


def ref(version: int, name: str = "a") -> AdapterRef:
    return AdapterRef(name=name, version=version)


def spec(rank: int = 4, alpha: float = 8.0, targets: tuple[str, ...] = ("linear_qkv", "linear_fc1")) -> AdapterSpec:
    return AdapterSpec(name="a", base_model="m", rank=rank, alpha=alpha, target_modules=targets)


def shapes_of(s: AdapterSpec) -> dict[str, tuple[int, ...]]:
    return moe_shapes(s.rank)


def values(seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """Random fp32 tensors of all names, on the full set: no sharing."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in moe_shapes(rank).items()}


def share(full: dict[str, torch.Tensor]) -> tuple[list[tuple[str, torch.Tensor]], dict[str, str]]:
    """(unique tensors, aliases) with k/v sharing q's lora_A and up sharing gate's, as Megatron's fused layers do.

    Changes ``full`` in place to hold the shared values.
    """
    aliases = {}
    for name in full:
        for other, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
            if name.endswith(f"{other}.lora_A.weight"):
                aliases[name] = name.replace(other, first)
                full[name] = full[aliases[name]]
    return [(n, t) for n, t in full.items() if n not in aliases], aliases


def packed(owned, aliases=(), *, version=0, parent=None, s=None, dtype="float32", run=RUN, base=BASE, source=0):
    """(pack buffer, manifest) of a single source."""
    buffer = PackBuffer(source, dtype)
    shard = buffer.pack(owned)
    manifest = build_manifest(
        run=run, ref=ref(version), parent=parent, spec=s or spec(), base_digest=base, shards=[shard],
        aliases=dict(aliases),
    )
    return buffer, manifest

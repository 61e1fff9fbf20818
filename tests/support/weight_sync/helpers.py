"""Small adapters with known values."""

from __future__ import annotations

import torch

from areal_lora.types import AdapterRef, AdapterSpec, AdapterStructure, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout, make_layout
from areal_lora.weight_sync.manifest import Announcement, shard_keys
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.weight_sync.adapters import moe_shapes, pack_of

RUN, BASE, SECRET = "run-1", "base-digest", "5e" * 32
KEYS = shard_keys(SECRET)
BUCKET_BYTES = 1024


def ref(version: int, name: str = "a") -> AdapterRef:
    return AdapterRef(name=name, version=version)


def spec(
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
) -> AdapterSpec:
    return AdapterSpec(name="a", base_model="m", rank=rank, alpha=alpha, target_modules=targets)


def shapes_of(s: AdapterStructure) -> dict[str, tuple[int, ...]]:
    return moe_shapes(s.rank)


def values(seed: int, rank: int = 4, **sizes: int) -> dict[str, torch.Tensor]:
    """Random fp32 tensors of all names, on the full set: no sharing."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in moe_shapes(rank, **sizes).items()}


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


def layout_of(owned, aliases=(), *, s=None, dtype="float32", source=0) -> AdapterLayout:
    """The layout of a single source."""
    return make_layout(s or spec(), dtype, {source: [(n, tuple(t.shape)) for n, t in owned]}, dict(aliases))


def announce(layout, *, version=0, parent=None, run=RUN, base=BASE, known=False) -> Announcement:
    manifest = ShardManifest(run=run, ref=ref(version), parent=parent, base_digest=base, layout=layout.digest)
    return Announcement(manifest=manifest, layout=None if known else layout, timeout_s=10.0)


def packed(
    owned, aliases=(), *, version=0, parent=None, s=None, dtype="float32", run=RUN, base=BASE, source=0, keys=KEYS
):
    """(packed shard, announcement) of a single source."""
    layout = layout_of(owned, aliases, s=s, dtype=dtype, source=source)
    shard = PackedShard(layout, source, keys)
    shard.pack(ref(version), pack_of(layout, source, dict(owned)))
    return shard, announce(layout, version=version, parent=parent, run=run, base=base)

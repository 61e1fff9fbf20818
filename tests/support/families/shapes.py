"""Model shapes without a config.json."""

from __future__ import annotations

from collections.abc import Collection

from areal_lora.families.registry import family_of
from areal_lora.families.shape import ModelShape


def make_shape(
    kind: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    expert_ffn: int = 0,
    shared_ffn: int = 0,
    experts: int = 0,
    dense: Collection[int] = (),
) -> ModelShape:
    """``dense`` are the layers of a mixture that have no experts."""
    return ModelShape(
        family=family_of(kind),
        layers=layers,
        sparse_layers=tuple(i for i in range(layers) if experts and i not in dense),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        expert_ffn=expert_ffn,
        shared_ffn=shared_ffn,
        experts=experts,
        experts_per_token=2 if experts else 0,
        vocab=0,
        max_positions=0,
        tied=False,
    )

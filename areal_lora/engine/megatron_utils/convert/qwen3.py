"""Qwen3 dense: attention with grouped queries, gated MLP.

Megatron's linear_qkv keeps, per query group, the group's queries, then its key, then its value.
Its linear_fc1 keeps the gate rows, then the up rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_lora.engine.megatron_utils.convert.registry import Dims, Family, Piece, SiteKey
from areal_lora.errors import UnknownTensorError


def attention_pieces(dims: Dims, layer: int, linear: str) -> list[Piece]:
    """Projections of linear_qkv or linear_proj."""
    base = f"model.layers.{layer}.self_attn"
    width = dims.heads * dims.head_dim
    if linear == "linear_proj":
        return [Piece(name=f"{base}.o_proj", in_features=width, rows=((0, dims.hidden),))]
    per_group = dims.heads // dims.kv_heads
    stride, d = (per_group + 2) * dims.head_dim, dims.head_dim
    starts = [g * stride for g in range(dims.kv_heads)]
    queries = tuple((s, s + per_group * d) for s in starts)
    keys = tuple((s + per_group * d, s + (per_group + 1) * d) for s in starts)
    values = tuple((s + (per_group + 1) * d, s + (per_group + 2) * d) for s in starts)
    return [
        Piece(name=f"{base}.{name}", in_features=dims.hidden, rows=rows)
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", values))
    ]


def gated_mlp_pieces(base: str, linear: str, hidden: int, ffn: int) -> list[Piece]:
    """Projections of linear_fc1 or linear_fc2 of the gated MLP named ``base``."""
    if linear == "linear_fc2":
        return [Piece(name=f"{base}.down_proj", in_features=ffn, rows=((0, hidden),))]
    return [
        Piece(name=f"{base}.gate_proj", in_features=hidden, rows=((0, ffn),)),
        Piece(name=f"{base}.up_proj", in_features=hidden, rows=((ffn, 2 * ffn),)),
    ]


def _sites(dims: Dims, layers: Sequence[int]) -> list[SiteKey]:
    linears = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    return [SiteKey(linear=linear, layer=layer) for layer in layers for linear in linears]


def _pieces(dims: Dims, key: SiteKey) -> list[Piece]:
    if key.expert is not None:
        raise UnknownTensorError(f"layer {key.layer}: a dense model has no expert {key.expert}")
    if key.linear in ("linear_qkv", "linear_proj"):
        return attention_pieces(dims, key.layer, key.linear)
    return gated_mlp_pieces(f"model.layers.{key.layer}.mlp", key.linear, dims.hidden, dims.ffn)


FAMILY = Family(model_types=("qwen3",), sites=_sites, pieces=_pieces)

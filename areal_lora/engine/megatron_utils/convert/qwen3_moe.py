"""Qwen3-MoE: Qwen3's attention, and gated experts with an adapter each."""

from __future__ import annotations

from collections.abc import Sequence

from areal_lora.engine.megatron_utils.convert.qwen3 import attention_pieces, gated_mlp_pieces
from areal_lora.engine.megatron_utils.convert.registry import Dims, Family, Piece, SiteKey
from areal_lora.errors import UnknownTensorError


def _sites(dims: Dims, layers: Sequence[int]) -> list[SiteKey]:
    sites = []
    for layer in layers:
        sites += [SiteKey(linear=linear, layer=layer) for linear in ("linear_qkv", "linear_proj")]
        sites += [
            SiteKey(linear=linear, layer=layer, expert=expert)
            for linear in ("linear_fc1", "linear_fc2")
            for expert in range(dims.experts)
        ]
    return sites


def _pieces(dims: Dims, key: SiteKey) -> list[Piece]:
    if key.linear in ("linear_qkv", "linear_proj"):
        return attention_pieces(dims, key.layer, key.linear)
    if key.expert is None or not 0 <= key.expert < dims.experts:
        raise UnknownTensorError(f"layer {key.layer}: {key.linear} of expert {key.expert}, there are {dims.experts}")
    base = f"model.layers.{key.layer}.mlp.experts.{key.expert}"
    return gated_mlp_pieces(base, key.linear, dims.hidden, dims.moe_ffn)


FAMILY = Family(model_types=("qwen3_moe",), sites=_sites, pieces=_pieces)

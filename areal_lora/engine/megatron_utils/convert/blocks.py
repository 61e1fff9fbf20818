"""Parts that the families have in common: attention with grouped queries, gated MLPs, experts.

Megatron's linear_qkv keeps, per query group, the group's queries, then its key, then its value.
Its linear_fc1 keeps the gate rows, then the up rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.engine.megatron_utils.convert.registry import Dims, Piece, Scope, SiteKey
from areal_lora.errors import UnknownTensorError
from areal_lora.types import ExpertLayout

ATTENTION = ("linear_qkv", "linear_proj")
MLP = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """What a checkpoint calls the projections of a gated MLP: act(gate x) * up x, then down."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def layer_sites(dims: Dims, layers: Sequence[int], expert_layout: ExpertLayout) -> list[SiteKey]:
    """The sites of ``layers`` in the order that `Family` promises."""
    sites = []
    for layer in layers:
        sites += [SiteKey(linear=linear, layer=layer, scope=Scope.ATTENTION) for linear in ATTENTION]
        if not dims.is_sparse(layer):
            sites += [SiteKey(linear=linear, layer=layer, scope=Scope.MLP) for linear in MLP]
            continue
        if dims.shared_ffn:
            sites += [SiteKey(linear=linear, layer=layer, scope=Scope.SHARED_EXPERT) for linear in MLP]
        if expert_layout is ExpertLayout.SHARED:
            sites += [SiteKey(linear=linear, layer=layer, scope=Scope.ALL_EXPERTS) for linear in MLP]
            continue
        sites += [
            SiteKey(linear=linear, layer=layer, scope=Scope.EXPERT, expert=expert)
            for linear in MLP
            for expert in range(dims.experts)
        ]
    return sites


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


def gated_mlp_pieces(
    bases: Sequence[str], linear: str, hidden: int, ffn: int, names: GatedMlp | None = None
) -> list[Piece]:
    """Projections of linear_fc1 or linear_fc2 of the gated MLP at ``bases[0]``; the other bases have the same."""
    names = names or GatedMlp()

    def piece(leaf: str, in_features: int, start: int, stop: int) -> Piece:
        first, *others = (f"{base}.{leaf}" for base in bases)
        return Piece(name=first, in_features=in_features, rows=((start, stop),), aliases=tuple(others))

    if linear == "linear_fc2":
        return [piece(names.down, ffn, 0, hidden)]
    return [piece(names.gate, hidden, 0, ffn), piece(names.up, hidden, ffn, 2 * ffn)]


def layer_pieces(
    dims: Dims, key: SiteKey, *, experts: str = "mlp.experts", names: GatedMlp | None = None
) -> list[Piece]:
    """Projections of any site of a model whose parts are called as in Llama and Qwen.

    ``experts`` is the path of the routed experts below the layer, ``names`` what their projections
    are called. Raises UnknownTensorError for a site that the model does not have.
    """
    _check(dims, key)
    mlp = f"model.layers.{key.layer}.mlp"
    match key.scope:
        case Scope.ATTENTION:
            return attention_pieces(dims, key.layer, key.linear)
        case Scope.MLP:
            return gated_mlp_pieces([mlp], key.linear, dims.hidden, dims.ffn)
        case Scope.SHARED_EXPERT:
            return gated_mlp_pieces([f"{mlp}.shared_expert"], key.linear, dims.hidden, dims.shared_ffn)
    numbers = range(dims.experts) if key.expert is None else [key.expert]
    bases = [f"model.layers.{key.layer}.{experts}.{number}" for number in numbers]
    return gated_mlp_pieces(bases, key.linear, dims.hidden, dims.moe_ffn, names)


def _check(dims: Dims, key: SiteKey) -> None:
    where = f"layer {key.layer}: {key.scope}.{key.linear}"
    if key.linear not in (ATTENTION if key.scope is Scope.ATTENTION else MLP):
        raise UnknownTensorError(f"{where} does not exist")
    if key.scope is Scope.MLP and dims.is_sparse(key.layer):
        raise UnknownTensorError(f"{where}: this layer has experts and no dense MLP")
    if key.scope in (Scope.EXPERT, Scope.ALL_EXPERTS) and not dims.is_sparse(key.layer):
        raise UnknownTensorError(f"{where}: this layer has no experts")
    if key.scope is Scope.SHARED_EXPERT and not (dims.shared_ffn and dims.is_sparse(key.layer)):
        raise UnknownTensorError(f"{where}: this layer has no shared expert")
    if (key.scope is Scope.EXPERT) != (key.expert is not None) or not 0 <= (key.expert or 0) < max(1, dims.experts):
        raise UnknownTensorError(f"{where} of expert {key.expert}, there are {dims.experts}")

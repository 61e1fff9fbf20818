"""Weights of the frozen base: from a Hugging Face folder straight into one rank's Megatron parameters.

Every rank reads the slices that it holds: no weight travels between ranks, and every layout is read the same
way. Both kinds of Megatron layers are supported: plain torch and Transformer Engine, whose linear layers contain
the preceding norm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from areal_lora.engine.common.arena import ShardedModel, held_rows
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.errors import UnknownTensorError
from areal_lora.families.family import COLUMN_PARALLEL, Family, Scope
from areal_lora.families.sites import Piece, SiteKey

_LAYER = re.compile(r"^decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)$")


_LINEAR = re.compile(
    r"^(?:self_attention\.(?P<attention>linear_qkv|linear_proj)"
    r"|mlp\.(?:(?P<shared>shared_experts)\.|(?P<experts>experts)\.)?"
    r"(?P<mlp>linear_fc[12]))\.(?P<what>weight|bias)$"
)


def load_base(module: nn.Module, folder: ModelFolder, model: ShardedModel, rank: int) -> None:
    """Fill every parameter of ``module``. Raises UnknownTensorError for a missing tensor or an unknown parameter."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_read(folder, model, rank, name, parameter))


def _read(folder: ModelFolder, model: ShardedModel, rank: int, name: str, parameter: Tensor) -> Tensor:
    """This rank's part of the parameter that Megatron calls ``name``."""
    if (found := _LAYER.match(name)) is not None:
        return _read_layer(folder, model, rank, int(found["layer"]), found["rest"])
    tp, rows = model.layout.tp_rank(rank), parameter.shape[0]
    if name == "decoder.final_layernorm.weight":
        return folder.whole("model.norm.weight")
    if name == "embedding.word_embeddings.weight":
        return folder.rows("model.embed_tokens.weight", tp * rows, (tp + 1) * rows)
    if name == "output_layer.weight":
        # Tied models have no lm_head; the last stage keeps a copy of the embeddings.
        hf = "lm_head.weight" if "lm_head.weight" in folder else "model.embed_tokens.weight"
        return folder.rows(hf, tp * rows, (tp + 1) * rows)
    raise UnknownTensorError(f"the model's parameter {name} has no known Hugging Face tensor")


def _read_layer(folder: ModelFolder, model: ShardedModel, rank: int, local: int, rest: str) -> Tensor:
    layer = model.layout.layers_of(rank)[local]
    base = f"model.layers.{layer}"
    if (replicated := _replicated(model.shape.family).get(rest)) is not None:
        return folder.whole(f"{base}.{replicated}.weight")
    if (found := _LINEAR.match(rest)) is None:
        raise UnknownTensorError(f"the model's parameter {rest} of layer {layer} has no known Hugging Face tensor")
    linear = found["attention"] or found["mlp"]
    if not found["experts"]:
        scope = Scope.SHARED_EXPERT if found["shared"] else Scope.ATTENTION if found["attention"] else Scope.MLP
        return _read_linear(folder, model, rank, SiteKey(linear=linear, layer=layer, scope=scope), found["what"])
    keys = [
        SiteKey(linear=linear, layer=layer, scope=Scope.EXPERT, expert=expert)
        for expert in model.layout.experts_of(rank)
    ]
    return torch.stack([_read_linear(folder, model, rank, key, found["what"]) for key in keys])


def _replicated(family: Family) -> dict[str, str]:
    """Hugging Face modules of the parameters of a layer that every rank holds whole, by Megatron's names."""
    names = {
        "input_layernorm.weight": family.input_norm,
        "self_attention.linear_qkv.layer_norm_weight": family.input_norm,
        "pre_mlp_layernorm.weight": family.mlp_norm,
        "mlp.linear_fc1.layer_norm_weight": family.mlp_norm,
        "self_attention.q_layernorm.weight": family.attention.q_norm,
        "self_attention.k_layernorm.weight": family.attention.k_norm,
    }
    if family.experts is not None:
        names["mlp.router.weight"] = family.experts.router
        names["mlp.shared_experts.gate_weight"] = family.experts.shared_gate
    return names


def _read_linear(folder: ModelFolder, model: ShardedModel, rank: int, key: SiteKey, what: str) -> Tensor:
    """This rank's rows (column-parallel) or columns of a linear layer, fused from its projections."""
    pieces = model.pieces(key)
    size, mine = model.group_size(key.scope), model.group_rank(key.scope, rank)
    if key.linear not in COLUMN_PARALLEL:
        if what == "bias":
            raise UnknownTensorError(f"layer {key.layer}: the bias of {key.linear} has no known Hugging Face tensor")
        each = pieces[0].in_features // size
        return folder.columns(f"{pieces[0].name}.weight", mine * each, (mine + 1) * each)
    held = held_rows(key.linear, sum(p.out_features for p in pieces), size)(mine)
    return torch.cat([folder.rows(f"{name}.{what}", a, b) for name, a, b in row_parts(pieces, held)])


def row_parts(pieces: Sequence[Piece], held: Sequence[tuple[int, int]]) -> list[tuple[str, int, int]]:
    """(projection, first row, last row) that make up the rows ``held`` of a fused layer, in their order."""
    spans = []  # fused start, stop, projection, its row there
    for piece in pieces:
        at = 0
        for start, stop in piece.rows:
            spans.append((start, stop, piece.name, at))
            at += stop - start
    spans.sort()
    parts = []
    for low, high in held:
        for start, stop, name, at in spans:
            first, last = max(low, start), min(high, stop)
            if first < last:
                parts.append((name, at + first - start, at + last - start))
    return parts

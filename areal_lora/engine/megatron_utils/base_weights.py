"""Weights of the frozen base: from a Hugging Face folder straight into one rank's Megatron parameters.

Of the ranks that hold the same slices the first one reads and broadcasts them: a file system serves each weight once,
however many replicas there are. Both kinds of Megatron layers are supported: plain torch and Transformer Engine, whose
linear layers contain the preceding norm.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.engine.common.arena import ShardedModel, held_rows
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.errors import UnknownTensorError
from areal_lora.families.family import COLUMN_PARALLEL, Family, Scope
from areal_lora.families.registry import rope_of
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import Piece, SiteKey
from areal_lora.platforms.device import synchronize

_NAME = re.compile(r"^(?P<chunk>\d+)\.(?:decoder\.layers\.(?P<layer>\d+)\.)?(?P<rest>.+)$")
LINEAR = (
    r"(?:self_attention\.(?P<attention>linear_qkv|linear_proj)"
    r"|mlp\.(?:(?P<shared>shared_experts)\.|(?P<experts>experts)\.)?(?P<mlp>linear_fc[12]))"
)
_LINEAR = re.compile(rf"^{LINEAR}\.(?P<what>weight|bias)$")


def scope_of(site: re.Match[str]) -> Scope:
    """Of a linear layer that is not an expert's."""
    return Scope.SHARED_EXPERT if site["shared"] else Scope.ATTENTION if site["attention"] else Scope.MLP


class _Names(ModelFolder):
    """The names of a folder, to find out what it lacks: its tensors are empty and nothing is read."""

    def __init__(self, folder: ModelFolder) -> None:
        self.path, self._files = folder.path, folder._files

    def _slice(self, name: str) -> Tensor:
        super()._slice(name)
        return torch.empty(0, 0)


def load_base(
    module: nn.Module,
    folder: ModelFolder,
    model: ShardedModel,
    rank: int,
    dense: dist.ProcessGroup | None = None,
    experts: dist.ProcessGroup | None = None,
) -> None:
    """Fill every parameter of the chunks in ``module``; collective over the replicas of dense layers and of experts.

    Raises UnknownTensorError for a missing tensor or an unknown parameter, on every rank.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            group = experts if ".experts." in name else dense
            if group is None or dist.get_rank(group) == 0:
                parameter.copy_(_read(folder, model, rank, name, parameter))
            else:
                _read(_Names(folder), model, rank, name, parameter)
            if group is not None and dist.get_world_size(group) > 1:
                dist.broadcast(parameter.detach(), group=group, group_src=0)
                # NCCL counts its time limit from when a broadcast is queued: a rank that reads nothing would queue all.
                synchronize(parameter.device)


def _read(folder: ModelFolder, model: ShardedModel, rank: int, name: str, parameter: Tensor) -> Tensor:
    """This rank's part of the parameter ``name``: the number of its chunk, and what Megatron calls it there."""
    found = _NAME.match(name)
    assert found, "it is of a chunk"
    if found["layer"]:
        layer = model.layout.chunks_of(rank)[int(found["chunk"])][int(found["layer"])]
        return _read_layer(folder, model, rank, layer, found["rest"])
    tp, rows, name = model.layout.tp_rank(rank), parameter.shape[0], found["rest"]
    if name == "decoder.final_layernorm.weight":
        return folder.whole("model.norm.weight")
    if name == "embedding.word_embeddings.weight":
        return folder.rows("model.embed_tokens.weight", tp * rows, (tp + 1) * rows)
    if name == "output_layer.weight":
        # Tied models have no lm_head; the last stage keeps a copy of the embeddings.
        hf = "lm_head.weight" if "lm_head.weight" in folder else "model.embed_tokens.weight"
        return folder.rows(hf, tp * rows, (tp + 1) * rows)
    raise UnknownTensorError(f"the model's parameter {name} has no known Hugging Face tensor")


def _read_layer(folder: ModelFolder, model: ShardedModel, rank: int, layer: int, rest: str) -> Tensor:
    base = f"model.layers.{layer}"
    if (replicated := _replicated(model.shape.family).get(rest)) is not None:
        return folder.whole(f"{base}.{replicated}.weight")
    if (found := _LINEAR.match(rest)) is None:
        raise UnknownTensorError(f"the model's parameter {rest} of layer {layer} has no known Hugging Face tensor")
    linear = found["attention"] or found["mlp"]
    if not found["experts"]:
        key = SiteKey(linear=linear, layer=layer, scope=scope_of(found))
        return _read_linear(folder, model, rank, key, found["what"])
    keys = (SiteKey(linear=linear, layer=layer, scope=Scope.EXPERT, expert=e) for e in model.layout.experts_of(rank))
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


def architecture(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and choices for Bridge's GPTModelProvider. `variants.unsupported` has refused what they do not cover."""
    shape = ModelShape.from_hf(hf)
    attention, experts = shape.family.attention, shape.family.experts
    kind, rope = rope_of(hf)
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "vocab_size": shape.vocab,
        "seq_length": shape.max_positions,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": attention.bias,
        "qk_layernorm": attention.norms,
        "share_embeddings_and_output_weights": shape.tied,
        # `attention.PackedAttention` rotates queries and keys: positions restart in every sequence.
        "position_embedding_type": "none",
        "rotary_base": rope.get("rope_theta") or hf.get("rope_theta") or 10000.0,
        "rope_scaling": kind == "llama3",
        "rope_scaling_factor": rope.get("factor") or 1.0,
    }
    if experts is not None:
        sparse = set(shape.sparse_layers)
        fields |= {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.expert_ffn,
            "moe_router_topk": shape.experts_per_token,
            "moe_layer_freq": [int(i in sparse) for i in range(shape.layers)],
            # True: softmax over all experts, and the weights of the chosen ones do not sum to 1.
            "moe_router_pre_softmax": not (experts.normalized or hf.get("norm_topk_prob", False)),
            "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
            "moe_shared_expert_gate": shape.shared_ffn > 0,
        }
    return fields

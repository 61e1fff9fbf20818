"""Sizes of a Hugging Face model, from its config.json alone, and what its modules are called.

Plans and guardrails calculate with these. Every supported family has q, k, v, o projections
and a gated MLP, replaced by experts and a router in sparse layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from areal_lora.families.published import PUBLISHED
from areal_lora.types import ExpertLayout


class Scope(StrEnum):
    """Where in a layer an adapted linear sits."""

    ATTENTION = "attention"  # linear_qkv, linear_proj
    MLP = "mlp"  # dense MLP of a layer
    EXPERT = "expert"  # one routed expert
    ALL_EXPERTS = "all_experts"  # one adapter shared by all routed experts of a layer (expert_layout "shared")
    SHARED_EXPERT = "shared_expert"  # Qwen2-MoE's always-on expert


TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Modules that LoRA can sit on, in Megatron's spelling; present in every supported architecture."""

_MODULE = re.compile(
    r"(?:^|\.)(?:(?P<attention>self_attn)|(?P<mlp>mlp)|(?P<shared_expert>mlp\.shared_expert)"
    r"|(?P<expert>mlp\.experts\.\d+))\.(?P<leaf>[a-z]+_proj)$"
    r"|(?:^|\.)block_sparse_moe\.experts\.\d+\.(?P<mixtral>w[123])$"
)
HF_TO_MEGATRON = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    "w1": "linear_fc1",
    "w3": "linear_fc1",
    "w2": "linear_fc2",
}

SUPPORTED = ("qwen3_moe", "qwen3", "qwen2", "llama", "mixtral", "qwen2_moe")

# Megatron's numbers, those of Llama 3.1 and later; only the factor can be chosen.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def target_of(hf_module_name: str) -> tuple[str, Scope] | None:
    """Megatron's linear and scope of a Hugging Face module (no ``.weight``, any prefix); None: not adaptable.

    ``model.layers.3.mlp.experts.7.gate_proj`` is ``("linear_fc1", Scope.EXPERT)``.
    """
    found = _MODULE.search(hf_module_name)
    if found is None:
        return None
    if found["mixtral"]:
        return HF_TO_MEGATRON[found["mixtral"]], Scope.EXPERT
    linear = HF_TO_MEGATRON.get(found["leaf"])
    scope = next(scope for scope in Scope if scope is not Scope.ALL_EXPERTS and found[scope.value])
    in_attention = linear in ("linear_qkv", "linear_proj")
    return None if linear is None or in_attention != (scope is Scope.ATTENTION) else (linear, scope)


def covers(target_modules: Sequence[str], linear: str, scope: Scope) -> bool:
    """Whether canonical targets name ``linear`` in ``scope``.

    ``linear_fc1`` covers every scope, ``expert.linear_fc1`` the routed experts only, whether each
    has an adapter of its own or all share one.
    """
    where = Scope.EXPERT if scope is Scope.ALL_EXPERTS else scope
    return linear in target_modules or f"{where}.{linear}" in target_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that matter here. ``experts`` is 0 for a dense model; only ``sparse_layers`` have them."""

    model_type: str
    layers: int
    sparse_layers: tuple[int, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    expert_ffn: int
    shared_ffn: int
    experts: int
    experts_per_token: int
    vocab: int
    max_positions: int
    tied: bool

    @property
    def moe_layers(self) -> int:
        return len(self.sparse_layers)

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def parameters(self) -> int:
        """Parameters of the base model, norms and biases included."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.model_type in ("qwen3", "qwen3_moe"):  # norms of queries and keys
            attention += 2 * self.head_dim
        if self.model_type in ("qwen2", "qwen2_moe"):  # bias of q, k, v
            attention += self.head_dim * (self.heads + 2 * self.kv_heads)
        experts = self.experts * (3 * self.hidden * self.expert_ffn + self.hidden)
        if self.shared_ffn:  # and its gate
            experts += 3 * self.hidden * self.shared_ffn + self.hidden
        layers = self.layers * (attention + 2 * self.hidden)
        mlps = self.moe_layers * experts + self.dense_layers * 3 * self.hidden * self.ffn
        return layers + mlps + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the fields of a config.json. Raises KeyError naming a field that is missing."""
        kind = str(config["model_type"])
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        # Published folders say num_experts; transformers 5 writes num_local_experts.
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        if not experts and (kind.endswith("_moe") or kind == "mixtral"):
            raise KeyError("num_experts")
        every = int(config.get("decoder_sparse_step") or 1)
        plain = set(config.get("mlp_only_layers") or [])
        sparse = [i for i in range(layers) if experts and i not in plain and (i + 1) % every == 0]
        return cls(
            model_type=kind,
            layers=layers,
            sparse_layers=tuple(sparse),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            ffn=int(config["intermediate_size"]),
            # Mixtral has no other MLP, so its experts' width has the plain name.
            expert_ffn=int(config["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"])
            if experts
            else 0,
            shared_ffn=int(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
            experts=experts,
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
            vocab=int(config["vocab_size"]),
            max_positions=int(config.get("max_position_embeddings") or 0),
            tied=bool(config.get("tie_word_embeddings", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """One adapter version.

    ``parameters`` in ``tensors`` go over the wire; ``names`` are the Hugging Face names they
    stand for, which hold ``file_parameters`` in a PEFT file because shared ones are repeated.
    """

    parameters: int
    file_parameters: int
    tensors: int
    names: int

    def nbytes(self, dtype: str) -> int:
        return self.parameters * _DTYPE_BYTES[dtype]


def adapter_size(shape: ModelShape, rank: int, targets: Sequence[str], expert_layout: ExpertLayout) -> AdapterSize:
    """Unique numbers of an adapter with these (canonical) targets.

    ``linear_qkv`` and ``linear_fc1`` are fused: one lora_A [rank, in] serves q, k, v (gate,
    up), so it is counted and sent once while every Hugging Face name needs its own. With layout
    ``shared`` the same holds for a layer's experts.
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shared = expert_layout is ExpertLayout.SHARED
    adapters, copies = (1, shape.experts) if shared else (shape.experts, 1)

    def mlp(scope: Scope, count: int, width: int, copies: int = 1) -> list[tuple[str, Scope, int, int, int, list[int]]]:
        return [
            ("linear_fc1", scope, count, copies, shape.hidden, [width, width]),
            ("linear_fc2", scope, count, copies, width, [shape.hidden]),
        ]

    # target, scope, how many, modules that one stands for, inputs, outputs of each Hugging Face projection
    blocks = [
        ("linear_qkv", Scope.ATTENTION, shape.layers, 1, shape.hidden, [query, key, key]),
        ("linear_proj", Scope.ATTENTION, shape.layers, 1, query, [shape.hidden]),
        *mlp(Scope.MLP, shape.dense_layers, shape.ffn),
        *mlp(Scope.SHARED_EXPERT, shape.moe_layers if shape.shared_ffn else 0, shape.shared_ffn),
        *mlp(Scope.EXPERT, shape.moe_layers * adapters, shape.expert_ffn, copies),
    ]
    chosen = [block[2:] for block in blocks if covers(targets, block[0], block[1])]
    return AdapterSize(
        parameters=sum(n * rank * (inputs + sum(outs)) for n, _, inputs, outs in chosen),
        file_parameters=sum(n * c * rank * (len(outs) * inputs + sum(outs)) for n, c, inputs, outs in chosen),
        tensors=sum(n * (1 + len(outs)) for n, _, _, outs in chosen),
        names=sum(n * c * 2 * len(outs) for n, c, _, outs in chosen),
    )


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """What the config.json of a supported family asks for that the trainer does not compute, a sentence each."""
    model = str(config["model_type"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    numbers = {key: rope.get(key, value) for key, value in _LLAMA3_ROPE.items()}
    sliding = config.get("sliding_window") and config.get("use_sliding_window", model == "mixtral")
    problems = {
        "attention_bias or mlp_bias is set": bool(config.get("attention_bias") or config.get("mlp_bias")),
        "qkv_bias is off": config.get("qkv_bias") is False,
        f"activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        f"rope type {kind!r}": kind != "default" and (model, kind) != ("llama", "llama3"),
        f"llama3 rope with {numbers}": kind == "llama3" and numbers != _LLAMA3_ROPE,
        "rope on a part of the head": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1,
        f"sliding window of {config.get('sliding_window')}": bool(sliding),
    }
    return [f"{what}, which the trainer does not compute" for what, found in problems.items() if found]


def base_bytes(shape: ModelShape, dtype: str) -> int:
    return shape.parameters * _DTYPE_BYTES[dtype]


def is_hub_name(path: str) -> bool:
    """True for ``owner/name``."""
    return bool(_HUB_NAME.match(path))


def known_config(hub_name: str) -> dict[str, Any] | None:
    """The built-in description of a published model; ``-Base`` variants share their sibling's sizes."""
    return PUBLISHED.get(hub_name) or PUBLISHED.get(hub_name.removesuffix("-Base"))


def known_models() -> tuple[str, ...]:
    return tuple(PUBLISHED)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json. Raises OSError or ValueError (not a JSON object)."""
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("config.json is not a JSON object")
    return data

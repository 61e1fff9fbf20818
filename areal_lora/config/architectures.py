"""Sizes of a Hugging Face model, from its config.json alone: what plans and guardrails calculate with.

Formulas follow the Qwen3 family (also right for Llama-like dense models): q, k, v, o
projections and a gated MLP, replaced by experts and a router in sparse layers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Scope(StrEnum):
    """Where in a layer an adapted linear sits."""

    ATTENTION = "attention"  # linear_qkv, linear_proj
    MLP = "mlp"  # dense MLP of a layer
    EXPERT = "expert"  # one routed expert
    ALL_EXPERTS = "all_experts"  # one adapter shared by all routed experts of a layer (expert_layout "shared")
    SHARED_EXPERT = "shared_expert"  # Qwen2-MoE's always-on expert


TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Modules that LoRA can sit on, in Megatron's spelling; present in every supported architecture."""

HF_TO_MEGATRON = {
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "qkv_proj": "linear_qkv",
    "o_proj": "linear_proj", "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "gate_up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}  # fmt: skip

_MODULE = re.compile(
    r"(?:^|\.)(?:(?P<attention>self_attn)|(?P<mlp>mlp)|(?P<shared_expert>mlp\.shared_expert)"
    r"|(?P<expert>mlp\.experts\.\d+))\.(?P<leaf>[a-z]+_proj)$"
    r"|(?:^|\.)block_sparse_moe\.experts\.\d+\.(?P<mixtral>w[123])$"
)
_LEAVES = {
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "o_proj": "linear_proj",
    "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2",
    "w1": "linear_fc1", "w3": "linear_fc1", "w2": "linear_fc2",
}  # fmt: skip

SUPPORTED = ("qwen3_moe", "qwen3")

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
_QWEN3_MOE = {
    **_QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
_DENSE_KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "tie_word_embeddings",
)  # fmt: skip
_MOE_KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "moe_intermediate_size", "intermediate_size",
    "num_key_value_heads",
)  # fmt: skip
# The published config.json values, so that a plan can be made where no hub is reachable.
_KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {**_QWEN3, **dict(zip(_DENSE_KEYS, (28, 1024, 16, 8, 3072, True), strict=True))},
    "Qwen/Qwen3-1.7B": {**_QWEN3, **dict(zip(_DENSE_KEYS, (28, 2048, 16, 8, 6144, True), strict=True))},
    "Qwen/Qwen3-4B": {**_QWEN3, **dict(zip(_DENSE_KEYS, (36, 2560, 32, 8, 9728, True), strict=True))},
    "Qwen/Qwen3-8B": {**_QWEN3, **dict(zip(_DENSE_KEYS, (36, 4096, 32, 8, 12288, False), strict=True))},
    "Qwen/Qwen3-14B": {**_QWEN3, **dict(zip(_DENSE_KEYS, (40, 5120, 40, 8, 17408, False), strict=True))},
    "Qwen/Qwen3-32B": {**_QWEN3, **dict(zip(_DENSE_KEYS, (64, 5120, 64, 8, 25600, False), strict=True))},
    "Qwen/Qwen3-30B-A3B": {**_QWEN3_MOE, **dict(zip(_MOE_KEYS, (48, 2048, 32, 768, 6144, 4), strict=True))},
    "Qwen/Qwen3-235B-A22B": {**_QWEN3_MOE, **dict(zip(_MOE_KEYS, (94, 4096, 64, 1536, 12288, 4), strict=True))},
}


def target_of(hf_module_name: str) -> tuple[str, Scope] | None:
    """Megatron's linear and scope of a Hugging Face module (no ``.weight``, any prefix); None: not adaptable.

    ``model.layers.3.mlp.experts.7.gate_proj`` is ``("linear_fc1", Scope.EXPERT)``.
    """
    found = _MODULE.search(hf_module_name)
    if found is None:
        return None
    if found["mixtral"]:
        return _LEAVES[found["mixtral"]], Scope.EXPERT
    linear = _LEAVES.get(found["leaf"])
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
        """Parameters of the base model, norms included."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_dim
        experts = self.experts * (3 * self.hidden * self.expert_ffn + self.hidden)
        layers = self.layers * (attention + 2 * self.hidden)
        mlps = self.moe_layers * experts + self.dense_layers * 3 * self.hidden * self.ffn
        return layers + mlps + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the fields of a config.json. Raises KeyError naming a field that is missing."""
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        # Published folders say num_experts; transformers 5 writes num_local_experts.
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        if not experts and str(config["model_type"]).endswith("_moe"):
            raise KeyError("num_experts")
        every = int(config.get("decoder_sparse_step") or 1)
        plain = set(config.get("mlp_only_layers") or [])
        sparse = [i for i in range(layers) if experts and i not in plain and (i + 1) % every == 0]
        return cls(
            model_type=str(config["model_type"]),
            layers=layers,
            sparse_layers=tuple(sparse),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            ffn=int(config["intermediate_size"]),
            expert_ffn=int(config.get("moe_intermediate_size") or 0),
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


def adapter_size(shape: ModelShape, rank: int, targets: tuple[str, ...]) -> AdapterSize:
    """Unique numbers of a per-expert adapter.

    ``linear_qkv`` and ``linear_fc1`` are fused: one lora_A [rank, in] serves q, k, v (gate,
    up), so it is counted and sent once while every Hugging Face name needs its own.
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    experts = shape.moe_layers * shape.experts
    # target, how many of them, inputs, outputs of each Hugging Face projection
    blocks: list[tuple[str, int, int, tuple[int, ...]]] = [
        ("linear_qkv", shape.layers, shape.hidden, (query, key, key)),
        ("linear_proj", shape.layers, query, (shape.hidden,)),
        ("linear_fc1", shape.dense_layers, shape.hidden, (shape.ffn, shape.ffn)),
        ("linear_fc2", shape.dense_layers, shape.ffn, (shape.hidden,)),
        ("linear_fc1", experts, shape.hidden, (shape.expert_ffn, shape.expert_ffn)),
        ("linear_fc2", experts, shape.expert_ffn, (shape.hidden,)),
    ]
    chosen = [(count, inputs, outputs) for target, count, inputs, outputs in blocks if target in targets]
    return AdapterSize(
        parameters=sum(count * rank * (inputs + sum(outputs)) for count, inputs, outputs in chosen),
        file_parameters=sum(count * rank * (len(outputs) * inputs + sum(outputs)) for count, inputs, outputs in chosen),
        tensors=sum(count * (1 + len(outputs)) for count, _, outputs in chosen),
        names=sum(count * 2 * len(outputs) for count, _, outputs in chosen),
    )


def base_bytes(shape: ModelShape, dtype: str) -> int:
    return shape.parameters * _DTYPE_BYTES[dtype]


def is_hub_name(path: str) -> bool:
    """True for ``owner/name``."""
    return bool(_HUB_NAME.match(path))


def known_config(hub_name: str) -> dict[str, Any] | None:
    """The built-in description of a published model; ``-Base`` variants share their sibling's sizes."""
    return _KNOWN.get(hub_name) or _KNOWN.get(hub_name.removesuffix("-Base"))


def known_models() -> tuple[str, ...]:
    return tuple(_KNOWN)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json. Raises OSError or ValueError (not a JSON object)."""
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("config.json is not a JSON object")
    return data


def cached_hub_folder(hub_name: str) -> Path | None:
    """Where the Hugging Face cache keeps a downloaded snapshot of ``hub_name``, if it does."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = hub / ("models--" + hub_name.replace("/", "--")) / "snapshots"
    folders = sorted(p.parent for p in snapshots.glob("*/config.json")) if snapshots.is_dir() else []
    return folders[-1] if folders else None

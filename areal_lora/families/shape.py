"""Sizes of a Hugging Face model, from its config.json alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lora.families.family import Experts, Family
from areal_lora.families.registry import FAMILIES, Checkpoint, family_of, read_checkpoint, rope_of, supported
from areal_lora.types import RouteShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A family and the sizes of one of its models.

    ``experts`` is 0 for a dense model; only ``sparse_layers`` have experts. ``ffn``, ``expert_ffn`` and
    ``shared_ffn`` are the widths of a dense MLP, of a routed expert and of the shared expert. ``checkpoint`` is there
    for a family without a row and describes its layers.
    """

    family: Family
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
    checkpoint: Checkpoint | None = None

    @property
    def moe_layers(self) -> int:
        return len(self.sparse_layers)

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def routes(self) -> RouteShape:
        return RouteShape(self.moe_layers, self.experts_per_token, self.experts)

    @property
    def parameters(self) -> int:
        """Parameters of the base model, norms and biases included."""
        if self.checkpoint is not None:
            return self.checkpoint.parameters
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.family.attention.norms:
            attention += 2 * self.head_dim
        if self.family.attention.bias:
            attention += self.head_dim * (self.heads + 2 * self.kv_heads)
        experts = self.experts * (3 * self.hidden * self.expert_ffn + self.hidden)
        if self.shared_ffn:  # and its gate
            experts += 3 * self.hidden * self.shared_ffn + self.hidden
        layers = self.layers * (attention + 2 * self.hidden)
        mlps = self.moe_layers * experts + self.dense_layers * 3 * self.hidden * self.ffn
        return layers + mlps + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> "ModelShape":
        """Read the fields of a config.json. ``checkpoint`` stands in for a row that the family does not have.

        Raises:
            KeyError: a field is missing; names it.
            ConfigError: the family has no row and there is no ``checkpoint``.
        """
        kind = str(config["model_type"])
        layers, heads, hidden = (
            int(config[key]) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        checkpoint = None if kind in supported() else checkpoint
        experts = expert_ffn = shared_ffn = 0
        if checkpoint is not None:
            # What a row would state of the experts; nothing else of it is read for a family without a row.
            family = Family(model_type=kind, experts=Experts(mlp=checkpoint.experts) if checkpoint.experts else None)
            experts, expert_ffn, sparse = checkpoint.n_experts, checkpoint.expert_ffn, checkpoint.expert_layers
            ffn = int(config.get("intermediate_size") or 4 * hidden)
        else:
            family, ffn = family_of(kind), int(config["intermediate_size"])
            if family.experts is not None:
                # Published folders write num_experts; transformers 5 writes num_local_experts.
                experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
                if not experts:
                    raise KeyError("num_experts")
                expert_ffn = int(config[family.experts.ffn_key])
                if family.experts.shared is not None:
                    shared_ffn = int(config.get("shared_expert_intermediate_size") or 0)
            every = int(config.get("decoder_sparse_step") or 1)
            plain = set(config.get("mlp_only_layers") or [])
            sparse = tuple(i for i in range(layers) if experts and i not in plain and (i + 1) % every == 0)
        return cls(
            family=family,
            layers=layers,
            sparse_layers=sparse,
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn=ffn,
            expert_ffn=expert_ffn,
            shared_ffn=shared_ffn,
            experts=experts,
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
            vocab=int(config["vocab_size"]),
            max_positions=int(config.get("max_position_embeddings") or 0),
            tied=bool(config.get("tie_word_embeddings", False)),
            checkpoint=checkpoint,
        )


def read_shape(folder: Path) -> ModelShape:
    """Sizes of the model in ``folder``. Raises like `ModelShape.from_hf` and `read_hf_config`."""
    config = read_hf_config(folder)
    return ModelShape.from_hf(config, None if config["model_type"] in supported() else read_checkpoint(folder, config))


def with_dense_layers(engine_args: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """``engine_args``, and the key of config.json without which vLLM adapts no dense layers of a mixture.

    The model is the same: the key lists layers that are dense without it.
    """
    row = FAMILIES.rows.get(config.get("model_type", ""))
    key = row.experts.vllm_dense_key if row and row.experts else ""
    shape = ModelShape.from_hf(config) if key and not config.get(key) else None
    if shape is None or not shape.dense_layers:
        return dict(engine_args)
    dense = sorted(set(range(shape.layers)) - set(shape.sparse_layers))
    return {**engine_args, "hf_overrides": {key: dense} | engine_args.get("hf_overrides", {})}


def longrope_context(config: Mapping[str, Any]) -> int | None:
    """The longest sequence for which a model with LongRoPE has its short factors; None for another model."""
    kind, rope = rope_of(config)
    if kind != "longrope":
        return None
    original: int | None = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    return original


def saved_bytes(shape: ModelShape, dtype: str) -> int:
    """Of the model's files."""
    return (shape.checkpoint.saved if shape.checkpoint else shape.parameters) * DTYPE_BYTES[dtype]


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder. Raises OSError or ValueError (not a JSON object)."""
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("config.json is not a JSON object")
    return data

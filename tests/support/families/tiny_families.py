"""One tiny transformers model per family; every size differs from every other, so that a mix-up shows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    # Not 10000, which every library assumes when it overlooks the key.
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
TINY: dict[str, dict[str, Any]] = {
    # grouped queries, a head size of its own, queries wider than the model
    "qwen3": {**_COMMON, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
    "qwen3_moe": {
        **_COMMON,
        **_MOE,
        "model_type": "qwen3_moe",
        "num_key_value_heads": 3,
        "head_dim": 8,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen2": {**_COMMON, "model_type": "qwen2", "num_key_value_heads": 1},
    # as many key/value heads as queries
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "num_key_value_heads": 6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 300.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    # as Nemo, queries narrower than the model
    "mistral": {**_COMMON, "model_type": "mistral", "num_key_value_heads": 2, "head_dim": 2, "sliding_window": None},
    "mixtral": {
        **_COMMON,
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        **_COMMON,
        **_MOE,
        "model_type": "qwen2_moe",
        "num_key_value_heads": 2,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 28,
    },
}


_WIDE = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 160, "initializer_range": 0.1}
"""vLLM's attention on CPU takes heads of 32 and more."""


@cache
def tiny_model(kind: str, wide: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY[kind], **(_WIDE if wide else {})}))
    return model.float().eval()


def save(kind: str, folder: Path, wide: bool = False) -> Path:
    """The folder that transformers writes: what the published checkpoints look like."""
    path = folder / kind
    tiny_model(kind, wide).save_pretrained(path)
    return path

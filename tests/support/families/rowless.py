"""Tiny random models of families without a row in the table: fused projections, biases and no gate, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from areal_lora.config.support import PACKED

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ROWLESS: dict[str, dict[str, Any]] = {
    "phi3": {},  # qkv_proj and gate_up_proj are one projection each
    "starcoder2": {"use_bias": True, "sliding_window": 6, "tie_word_embeddings": True},  # no gate
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    **{kind: {} for kind in sorted(PACKED - {"phi3", "starcoder2", "olmoe", "granite"})},
    "granite": {"logits_scaling": 4.0},
    **{kind: {"head_dim": 32} for kind in ("helium", "hunyuan_v1_dense", "ministral")},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    "exaone_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 6},
    "glm4_moe": {"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    # as all published ones; vLLM assumes it
    **{kind: {"tie_word_embeddings": True} for kind in ("cohere", "gemma", "gemma3_text")},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 6, "sliding_window_pattern": 2},
}


def save_rowless(kind: str, folder: Path, **keys: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**(SIZES | ROWLESS.get(kind, {}) | keys)), dtype=torch.float32
    )
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias"):  # the correction bias of a router's choice is a buffer
                values.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    return folder

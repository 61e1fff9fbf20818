"""Variants of the supported families that the Megatron engine does not compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_lora.families.registry import family_of

# Megatron's numbers, those of Llama 3.1 and later; only the factor can be chosen.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """List what the config.json of a supported family requires and the Megatron engine does not compute."""
    family = family_of(str(config["model_type"]))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    numbers = {key: rope.get(key, value) for key, value in _LLAMA3_ROPE.items()}
    sliding = config.get("sliding_window") and config.get("use_sliding_window", family.sliding_window)
    problems = {
        "attention_bias or mlp_bias is set": bool(config.get("attention_bias") or config.get("mlp_bias")),
        "qkv_bias is off": config.get("qkv_bias") is False,
        f"activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        f"rope type {kind!r}": kind not in family.rope_types,
        f"llama3 rope with {numbers}": kind == "llama3" and numbers != _LLAMA3_ROPE,
        "rope on a part of the head": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1,
        f"sliding window of {config.get('sliding_window')}": bool(sliding),
    }
    return [f"{what}, which the Megatron engine does not compute" for what, found in problems.items() if found]

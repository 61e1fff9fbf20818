"""Variants of supported families that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lora.families.registry import known_config, unsupported

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("meta-llama/Llama-3.1-8B", {"rope_scaling": LLAMA3}, ""),
        ("meta-llama/Llama-3.1-8B", {"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, "high_freq_factor': 2.0"),
        ("Qwen/Qwen3-8B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ""),
        ("Qwen/Qwen3-8B", {"rope_parameters": {**LLAMA3}}, "rope type 'llama3'"),
        ("Qwen/Qwen3-8B", {"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
        ("Qwen/Qwen3-8B", {"attention_bias": True}, "attention_bias"),
        ("Qwen/Qwen3-8B", {"hidden_act": "gelu"}, "'gelu'"),
        ("Qwen/Qwen2.5-7B-Instruct", {"use_sliding_window": False, "sliding_window": 131072}, ""),
        ("Qwen/Qwen2.5-7B-Instruct", {"use_sliding_window": True, "sliding_window": 4096}, "window of 4096"),
        ("mistralai/Mixtral-8x7B-v0.1", {"sliding_window": 4096}, "window of 4096"),
        ("", {"model_type": "mistral", "sliding_window": None}, ""),
        ("", {"model_type": "mistral", "sliding_window": 4096}, "window of 4096"),
        ("Qwen/Qwen1.5-MoE-A2.7B", {"qkv_bias": False}, "qkv_bias"),
    ],
)
def test_what_the_trainer_does_not_compute(name: str, changes: dict[str, Any], problem: str) -> None:
    found = unsupported({**(known_config(name) or {}), **changes})
    assert len(found) == bool(problem)
    assert problem in " ".join(found)

"""Valid and invalid target_modules and exclude_modules, and what they select in models of several kinds."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lora.errors import ConfigError
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.families.targets import resolve

FC, ATT = ["linear_fc1", "linear_fc2"], ["linear_proj", "linear_qkv"]


def shape(name: str, **changes: Any) -> ModelShape:
    return ModelShape.from_hf({**(known_config(name) or {}), **changes})


SHAPES = {
    "dense": shape("Qwen/Qwen3-0.6B"),
    "moe": shape("Qwen/Qwen3-30B-A3B", num_hidden_layers=4),
    "mixed": shape("Qwen/Qwen1.5-MoE-A2.7B", num_hidden_layers=4, mlp_only_layers=[0]),  # dense, shared, routed
    "qwen2": shape("Qwen/Qwen2.5-0.5B-Instruct"),
    "mixtral": shape("mistralai/Mixtral-8x7B-v0.1", num_hidden_layers=4),
}

# fmt: off
# model, target_modules, exclude_modules, canonical
MEANT: list[tuple[str, list[str], list[str], list[str]]] = [
    ("dense", ["all-linear"], [], FC + ATT),
    ("mixed", ["*"], [], FC + ATT),
    ("mixed", ["linear_*"], ["linear_fc2"], ["linear_fc1", *ATT]),
    ("dense", ["q_proj", "k_proj", "v_proj"], [], ["linear_qkv"]),
    ("dense", ["[qkvo]_proj", "gate_up_proj"], [], ["linear_fc1", *ATT]),
    ("moe", ["all-linear"], ["experts"], ATT),
    ("moe", ["experts"], [], FC),  # a model without dense layers: nothing else has fc1
    ("mixed", ["experts"], [], ["expert.linear_fc1", "expert.linear_fc2"]),
    ("mixed", ["*.mlp.experts.*"], [], ["expert.linear_fc1", "expert.linear_fc2"]),
    ("mixed", ["mlp", "shared_expert"], [], ["mlp.linear_fc1", "mlp.linear_fc2",
                                             "shared_expert.linear_fc1", "shared_expert.linear_fc2"]),
    ("mixed", ["all-linear"], ["shared_expert", "mlp.linear_fc2"], ["expert.linear_fc1", "expert.linear_fc2", *ATT, "mlp.linear_fc1"]),
    ("mixed", ["model.layers.*.mlp.shared_expert.down_proj"], [], ["shared_expert.linear_fc2"]),
    ("mixed", ["decoder.layers.*.mlp.experts.local_experts.*.linear_fc2"], [], ["expert.linear_fc2"]),
    ("mixed", ["*.self_attention.*", "experts.down_proj"], [], ["expert.linear_fc2", *ATT]),
    ("mixed", ["expert.linear_fc1", "linear_fc2"], [], ["expert.linear_fc1", "linear_fc2"]),
    ("mixtral", ["w1", "w2", "w3"], [], FC),
    ("mixtral", ["*.block_sparse_moe.experts.*.w[13]", "attention"], [], ["linear_fc1", *ATT]),
    ("dense", ["all-linear"], ["lm_head", "embed_tokens", "gate"], FC + ATT),
]
# model, target_modules, exclude_modules, list that is wrong, words of the line
REFUSED: list[tuple[str, list[str], list[str], str, list[str]]] = [
    ("dense", ["q_proj"], [], "target_modules", ["q_proj without k_proj, v_proj", "one linear_qkv", "name q_proj, k_proj, v_proj"]),
    ("mixtral", ["w1"], [], "target_modules", ["w1 without w3", "linear_fc1"]),
    ("dense", ["all-linear"], ["up_proj"], "exclude_modules", ["gate_proj without up_proj"]),
    ("dense", ["linear_qvk"], [], "target_modules", ["'linear_qvk' matches no module", "all-linear, linear_qkv"]),
    ("dense", ["experts"], [], "target_modules", ["'experts' matches no module"]),
    ("dense", ["w1", "w3"], [], "target_modules", ["'w1' matches no module"]),
    ("mixtral", ["gate_proj", "up_proj"], [], "target_modules", ["'gate_proj' matches no module", "w1, w3, w2"]),
    ("moe", ["router"], [], "target_modules", ["'router' names the router: vLLM could serve LoRA on it, but", "training engines adapt only projections"]),
    ("moe", ["all-linear", "*.mlp.gate"], [], "target_modules", ["the router", "training engines adapt only projections"]),
    ("dense", ["lm_head"], [], "target_modules", ["output layer: vLLM could serve LoRA on it, but", "training engines adapt only projections"]),
    ("dense", ["gate"], [], "target_modules", ["'gate' matches no module"]),
    ("qwen2", ["embed_tokens"], [], "target_modules", ["embeddings: vLLM serves no LoRA on it in qwen2 models, and", "training engines adapt only projections"]),
    ("mixed", ["shared_expert_gate"], [], "target_modules", ["gate of the shared expert: vLLM could", "training engines adapt only projections"]),
    ("dense", ["all-linear"], ["linear_*"], "exclude_modules", ["leaves no module"]),
    ("dense", ["all-linear"], ["expert"], "exclude_modules", ["'expert' matches no module"]),
    ("dense", ["model.layers.0.self_attn.o_proj"], [], "target_modules", ["1 of 28 modules o_proj", "write *"]),
    ("moe", ["*.experts.7.*"], [], "target_modules", ["4 of 512", "all layers and experts"]),
]
# fmt: on
# ruff: noqa: E501


@pytest.mark.parametrize(("model", "include", "exclude", "canonical"), MEANT)
def test_what_is_meant(model: str, include: list[str], exclude: list[str], canonical: list[str]) -> None:
    got = resolve(include, exclude, SHAPES[model])
    assert list(got) == canonical
    assert resolve(got, [], SHAPES[model]) == got, "canonical targets mean themselves"


@pytest.mark.parametrize(("model", "include", "exclude", "key", "words"), REFUSED)
def test_what_is_refused(model: str, include: list[str], exclude: list[str], key: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(include, exclude, SHAPES[model])
    assert caught.value.path == key
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)

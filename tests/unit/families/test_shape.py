"""Model and adapter sizes against published figures, and against counting real modules."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_lora.families.registry import PUBLISHED, known_config, unsupported
from areal_lora.families.shape import ModelShape, with_dense_layers
from tests.support.paths import TINY_MODEL


def shape_of(name: str) -> ModelShape:
    config = known_config(name)
    assert config is not None
    return ModelShape.from_hf(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-0.6B", 0.60),
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen3-32B", 32.76),
        ("Qwen/Qwen3-30B-A3B-Base", 30.53),
        ("Qwen/Qwen3-235B-A22B", 235.09),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14.32),
        ("meta-llama/Llama-2-7b-hf", 6.74),
        ("meta-llama/Llama-3.1-70B", 70.55),
        ("mistralai/Mixtral-8x7B-v0.1", 46.70),
        ("mistralai/Mixtral-8x22B-v0.1", 140.62),
    ],
)
def test_base_sizes_are_the_published_ones(name: str, billions: float) -> None:
    assert shape_of(name).parameters / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_those_of_transformers(name: str) -> None:
    """Every known model is built by transformers on the meta device, which holds no numbers."""
    config = dict(known_config(name) or {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert unsupported(config) == []
    assert shape_of(name).parameters == sum(p.numel() for p in model.parameters())


def test_tiny_model_size_equals_its_weights() -> None:
    safetensors = pytest.importorskip("safetensors")
    shape = ModelShape.from_hf(json.loads((TINY_MODEL / "config.json").read_text()))
    assert shape.experts == 8, "transformers 5 spells it num_local_experts"
    with safetensors.safe_open(TINY_MODEL / "model.safetensors", framework="numpy") as file:
        counted = 0
        for name in file.keys():  # noqa: SIM118
            n = 1
            for length in file.get_slice(name).get_shape():
                n *= length
            counted += n
    assert shape.parameters == counted


def test_mixture_without_expert_count_is_incomplete() -> None:
    config = dict(known_config("Qwen/Qwen3-30B-A3B") or {})
    del config["num_experts"]
    with pytest.raises(KeyError):
        ModelShape.from_hf(config)


@pytest.mark.parametrize(
    ("changed", "given", "found"),
    [
        ({}, {}, {}),
        ({"decoder_sparse_step": 2}, {"x": 1}, {"x": 1, "hf_overrides": {"mlp_only_layers": [0, 2]}}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {}, {}),
        ({"decoder_sparse_step": 2}, {"hf_overrides": {"x": 1}}, {"hf_overrides": {"mlp_only_layers": [0, 2], "x": 1}}),
        ({"model_type": "qwen3"}, {"hf_overrides": {"x": 1}}, {"hf_overrides": {"x": 1}}),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 2}, {}, {}),
        ({"model_type": "of no row"}, {}, {}),
    ],
)
def test_vllm_is_told_of_dense_layers_that_config_json_has_by_a_step(
    changed: dict[str, object], given: dict[str, object], found: dict[str, object]
) -> None:
    hf = json.loads((TINY_MODEL / "config.json").read_text()) | {"num_hidden_layers": 4, "mlp_only_layers": []}
    assert with_dense_layers(given, hf | changed) == found
    shapes = [ModelShape.from_hf(hf | changed | more) for more in (found.get("hf_overrides", {}), {})] if found else []
    assert not shapes or shapes[0].sparse_layers == shapes[1].sparse_layers, "the model is the same"

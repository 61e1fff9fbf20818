"""Model and adapter sizes against published figures, and against counting real modules."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_lora.families.shape import TARGETS, ModelShape, adapter_size, known_config, known_models, unsupported
from areal_lora.types import ExpertLayout
from tests.support.paths import ROOT

TINY = ROOT / "examples" / "math" / "tiny_model"


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


@pytest.mark.parametrize("name", known_models())
def test_parameters_equal_those_of_transformers(name: str) -> None:
    """Every known model is built by transformers on the meta device, which holds no numbers."""
    config = dict(known_config(name) or {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert unsupported(config) == []
    assert shape_of(name).parameters == sum(p.numel() for p in model.parameters())


def test_names_of_the_30b_adapter() -> None:
    # 48 layers x (4 attention projections + 128 experts x 3) x (A and B); 1.69 GB in bf16 at rank 16.
    size = adapter_size(shape_of("Qwen/Qwen3-30B-A3B"), 16, TARGETS, ExpertLayout.PER_EXPERT)
    assert size.names == 37_248
    assert size.file_parameters * 2 / 1e9 == pytest.approx(1.69, abs=0.005)
    assert size.tensors == 48 * (4 + 2 + 128 * 5)


def hf_linears(shape: ModelShape) -> list[tuple[str, str, int, int]]:
    """(Megatron target, Hugging Face name, in, out) of every adaptable linear, one by one."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = []
    for layer in range(shape.layers):
        attention = [("q", query), ("k", key), ("v", key)]
        rows += [("linear_qkv", f"{layer}.{n}", shape.hidden, out) for n, out in attention]
        rows.append(("linear_proj", f"{layer}.o", query, shape.hidden))
        for expert in range(shape.experts):
            for n in ("gate", "up"):
                rows.append(("linear_fc1", f"{layer}.{expert}.{n}", shape.hidden, shape.expert_ffn))
            rows.append(("linear_fc2", f"{layer}.{expert}.down", shape.expert_ffn, shape.hidden))
    return rows


@pytest.mark.parametrize("targets", [t for n in range(1, 5) for t in itertools.combinations(TARGETS, n)])
def test_adapter_size_equals_counting_one_by_one(targets: tuple[str, ...]) -> None:
    shape = ModelShape.from_hf(json.loads((TINY / "config.json").read_text()))
    rank = 8
    rows = [row for row in hf_linears(shape) if row[0] in targets]
    # A lora_A is shared by the projections that are fused into one Megatron module.
    shared = {(target, name.rpartition(".")[0], n_in) for target, name, n_in, _ in rows}
    size = adapter_size(shape, rank, targets, ExpertLayout.PER_EXPERT)
    assert size.names == 2 * len(rows)
    assert size.tensors == len(rows) + len(shared)
    assert size.file_parameters == sum(rank * (n_in + n_out) for _, _, n_in, n_out in rows)
    assert size.parameters == sum(rank * n_out for *_, n_out in rows) + sum(rank * n_in for *_, n_in in shared)


def test_tiny_model_size_equals_its_weights() -> None:
    safetensors = pytest.importorskip("safetensors")
    shape = ModelShape.from_hf(json.loads((TINY / "config.json").read_text()))
    assert shape.experts == 8, "transformers 5 spells it num_local_experts"
    with safetensors.safe_open(TINY / "model.safetensors", framework="numpy") as file:
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
        ("Qwen/Qwen1.5-MoE-A2.7B", {"qkv_bias": False}, "qkv_bias"),
    ],
)
def test_what_the_trainer_does_not_compute(name: str, changes: dict, problem: str) -> None:
    found = unsupported({**(known_config(name) or {}), **changes})
    assert len(found) == bool(problem)
    assert problem in " ".join(found)

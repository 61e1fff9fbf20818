"""Rows found by model type and by module name."""

from __future__ import annotations

import pytest

from areal_lora.errors import ConfigError
from areal_lora.families.family import Family, GatedMlp, Scope
from areal_lora.families.registry import FAMILIES, TABLE, Families, family_of, supported, target_of
from tests.support.families.tiny_families import TINY


def test_supported_are_those_with_a_family() -> None:
    assert sorted(supported()) == sorted(FAMILIES.rows) == sorted(TINY)


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="qwen3"):
        family_of("gpt2")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("model.layers.3.self_attn.k_proj", ("linear_qkv", Scope.ATTENTION)),
        ("base_model.model.model.layers.3.self_attn.o_proj", ("linear_proj", Scope.ATTENTION)),
        ("model.layers.3.mlp.up_proj", ("linear_fc1", Scope.MLP)),
        ("model.layers.3.mlp.experts.7.down_proj", ("linear_fc2", Scope.EXPERT)),
        ("model.layers.3.mlp.shared_expert.gate_proj", ("linear_fc1", Scope.SHARED_EXPERT)),
        ("model.layers.3.block_sparse_moe.experts.0.w1", ("linear_fc1", Scope.EXPERT)),
        ("model.layers.3.block_sparse_moe.experts.0.w2", ("linear_fc2", Scope.EXPERT)),
        ("model.layers.3.mlp.gate", None),
        ("model.layers.3.mlp.shared_expert_gate", None),
        ("model.layers.3.block_sparse_moe.gate", None),
        ("model.layers.3.mlp.q_proj", None),
        ("model.layers.3.self_attn.gate_proj", None),
        ("model.layers.3.mlp.experts.gate_up_proj", None),
        ("lm_head", None),
    ],
)
def test_target_of_a_module(name: str, target: tuple[str, Scope] | None) -> None:
    assert target_of(name) == target


def test_rows_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="two families have the model type llama"):
        Families([*TABLE, Family(model_type="llama")])
    swapped = GatedMlp(gate="mlp.gate_proj", up="mlp.down_proj", down="mlp.up_proj")
    with pytest.raises(ValueError, match=r"disagree about mlp\.down_proj"):
        Families([*TABLE, Family(model_type="new", mlp=swapped)])

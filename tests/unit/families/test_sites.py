"""Rows, names and refusals of the conversion, written down one by one; test_sites_checkpoints.py has every family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from areal_lora.errors import AdapterError, UnknownTensorError
from areal_lora.families.family import Scope
from areal_lora.families.registry import family_of
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import SiteKey, pieces_of, sites_of, wire_names
from areal_lora.types import ExpertLayout
from tests.support.families.conversion import to_hf, to_megatron
from tests.support.families.shapes import make_shape

RANK = 2
DENSE = make_shape("qwen3", layers=4, hidden=8, heads=6, kv_heads=2, head_dim=3, ffn=10)
MIXED = make_shape(
    "qwen2_moe",
    layers=4,
    hidden=8,
    heads=6,
    kv_heads=6,
    head_dim=3,
    ffn=10,
    expert_ffn=4,
    experts=2,
    shared_ffn=5,
    dense=[0],
)
QKV = SiteKey(linear="linear_qkv", layer=1, scope=Scope.ATTENTION)


def rows_of(kind: str, shape: ModelShape, key: SiteKey) -> dict[str, list[float]]:
    """Row r of the fused lora_B holds the number r; what each projection gets of it."""
    pieces = pieces_of(replace(shape, family=family_of(kind)), key)
    out = sum(p.out_features for p in pieces)
    lora_b = torch.arange(float(out))[:, None].expand(out, RANK)
    tensors = to_hf(pieces, torch.zeros(RANK, pieces[0].in_features), lora_b)
    assert all(t.is_contiguous() for t in tensors.values())
    return {n.split(".")[-3]: t[:, 0].tolist() for n, t in tensors.items() if "lora_B" in n}


def test_qkv_rows_are_kept_per_query_group() -> None:
    """Two groups of three query heads, a key head and a value head, three rows each."""
    rows = rows_of("qwen3", DENSE, QKV)
    assert rows["q_proj"] == [*range(0, 9), *range(15, 24)]
    assert rows["k_proj"] == [9, 10, 11, 24, 25, 26]
    assert rows["v_proj"] == [12, 13, 14, 27, 28, 29]


def test_qkv_rows_with_as_many_keys_as_queries() -> None:
    rows = rows_of("qwen2_moe", MIXED, QKV)
    assert rows["q_proj"][:6] == [0, 1, 2, 9, 10, 11]
    assert rows["k_proj"][:6] == [3, 4, 5, 12, 13, 14]
    assert rows["v_proj"][-3:] == [51, 52, 53]


@pytest.mark.parametrize(("kind", "gate", "up"), [("qwen3_moe", "gate_proj", "up_proj"), ("mixtral", "w1", "w3")])
def test_gate_is_the_upper_half(kind: str, gate: str, up: str) -> None:
    rows = rows_of(kind, MIXED, SiteKey(linear="linear_fc1", layer=2, scope=Scope.EXPERT, expert=1))
    assert rows == {gate: [0, 1, 2, 3], up: [4, 5, 6, 7]}


def test_sites_of_a_layer_in_order() -> None:
    def text(layout: ExpertLayout) -> list[str]:
        keys = [key for key in sites_of(MIXED, layout) if key.layer in (0, 3)]
        return [f"{k.layer} {k.scope} {k.linear[-3:]} {'' if k.expert is None else k.expert}".strip() for k in keys]

    first = ["0 attention qkv", "0 attention roj", "0 mlp fc1", "0 mlp fc2"]
    common = ["3 attention qkv", "3 attention roj", "3 shared_expert fc1", "3 shared_expert fc2"]
    experts = ["3 expert fc1 0", "3 expert fc1 1", "3 expert fc2 0", "3 expert fc2 1"]
    assert text(ExpertLayout.PER_EXPERT) == first + common + experts
    assert text(ExpertLayout.SHARED_OUTER) == first + common + experts
    assert text(ExpertLayout.SHARED) == first + common + ["3 all_experts fc1", "3 all_experts fc2"]


def test_shared_tensors_travel_once() -> None:
    """lora_A of gate and up, and all that the other experts have."""
    key = SiteKey(linear="linear_fc1", layer=1, scope=Scope.ALL_EXPERTS)
    shapes, aliases = wire_names(pieces_of(replace(MIXED, family=family_of("qwen3_moe")), key))
    e = "model.layers.1.mlp.experts"
    assert shapes == {
        f"{e}.0.gate_proj.lora_A.weight": (-1, 8),
        f"{e}.0.gate_proj.lora_B.weight": (4, -1),
        f"{e}.0.up_proj.lora_B.weight": (4, -1),
    }
    lora_a = f"{e}.0.gate_proj.lora_A.weight"
    assert aliases == {
        f"{e}.0.up_proj.lora_A.weight": lora_a,
        f"{e}.1.gate_proj.lora_A.weight": lora_a,
        f"{e}.1.up_proj.lora_A.weight": lora_a,
        f"{e}.1.gate_proj.lora_B.weight": f"{e}.0.gate_proj.lora_B.weight",
        f"{e}.1.up_proj.lora_B.weight": f"{e}.0.up_proj.lora_B.weight",
    }


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (SiteKey(linear="linear_fc1", layer=1, scope=Scope.EXPERT, expert=2), "expert 2, there are 2"),
        (SiteKey(linear="linear_fc1", layer=1, scope=Scope.EXPERT), "expert None"),
        (SiteKey(linear="linear_fc1", layer=1, scope=Scope.ALL_EXPERTS, expert=0), "expert 0"),
        (SiteKey(linear="linear_fc1", layer=0, scope=Scope.EXPERT, expert=0), "does not exist"),
        (SiteKey(linear="linear_fc1", layer=0, scope=Scope.SHARED_EXPERT), "does not exist"),
        (SiteKey(linear="linear_fc2", layer=1, scope=Scope.MLP), "does not exist"),
        (SiteKey(linear="linear_qkv", layer=1, scope=Scope.MLP), "does not exist"),
        (SiteKey(linear="linear_fc1", layer=1, scope=Scope.ATTENTION), "does not exist"),
    ],
)
def test_sites_that_a_model_does_not_have(key: SiteKey, words: str) -> None:
    with pytest.raises(UnknownTensorError, match=words):
        pieces_of(MIXED, key)


def test_refusals() -> None:
    pieces = pieces_of(DENSE, SiteKey(linear="linear_proj", layer=0, scope=Scope.ATTENTION))
    with pytest.raises(UnknownTensorError, match="lora_A"):
        to_megatron(pieces, {})
    tensors = to_hf(pieces, torch.zeros(RANK, 18), torch.zeros(8, RANK))
    tensors["model.layers.0.self_attn.o_proj.lora_B.weight"] = torch.zeros(7, RANK)
    with pytest.raises(AdapterError, match="shape"):
        to_megatron(pieces, tensors)

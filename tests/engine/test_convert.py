"""Conversion as data: both directions, against a fused matrix that is built row by row here."""

from __future__ import annotations

import pytest
import torch

from areal_lora.engine.megatron_utils.convert import FAMILIES, family_for
from areal_lora.engine.megatron_utils.convert.registry import Dims, Scope, SiteKey, to_hf, to_megatron, wire_names
from areal_lora.errors import AdapterError, ConfigError, UnknownTensorError
from areal_lora.types import ExpertLayout

DIMS = Dims(hidden=8, heads=6, kv_heads=2, head_dim=3, ffn=10, moe_ffn=4, experts=4)
DENSE = Dims(hidden=8, heads=6, kv_heads=2, head_dim=3, ffn=10, moe_ffn=0, experts=0)
RANK = 2


def dims_of(kind: str) -> Dims:
    return DIMS if kind.endswith("_moe") else DENSE


def all_sites() -> list[tuple[str, SiteKey]]:
    return [
        (kind, key)
        for kind, family in FAMILIES.items()
        for layout in ExpertLayout
        for key in family.sites(dims_of(kind), [0, 3], layout)
    ]


def test_qkv_rows_are_kept_per_query_group() -> None:
    """Row r of the fused matrix holds the number r; each group is 3 query heads, a key head, a value head."""
    pieces = family_for("qwen3").pieces(DENSE, SiteKey(linear="linear_qkv", layer=1, scope=Scope.ATTENTION))
    fused = torch.arange(30.0)[:, None].expand(30, RANK)
    tensors = to_hf(pieces, torch.zeros(RANK, 8), fused)
    rows = {n.split(".")[-3]: t[:, 0].tolist() for n, t in tensors.items() if "lora_B" in n}
    assert rows["q_proj"] == [*range(0, 9), *range(15, 24)]
    assert rows["k_proj"] == [9, 10, 11, 24, 25, 26]
    assert rows["v_proj"] == [12, 13, 14, 27, 28, 29]


def test_gate_is_the_upper_half() -> None:
    pieces = family_for("qwen3_moe").pieces(DIMS, SiteKey(linear="linear_fc1", layer=2, scope=Scope.EXPERT, expert=3))
    tensors = to_hf(pieces, torch.zeros(RANK, 8), torch.arange(8.0)[:, None].expand(8, RANK))
    assert tensors["model.layers.2.mlp.experts.3.gate_proj.lora_B.weight"][:, 0].tolist() == [0, 1, 2, 3]
    assert tensors["model.layers.2.mlp.experts.3.up_proj.lora_B.weight"][:, 0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("kind", "key"), all_sites())
def test_there_and_back_is_exact(kind: str, key: SiteKey) -> None:
    pieces = FAMILIES[kind].pieces(dims_of(kind), key)
    lora_a = torch.randn(RANK, pieces[0].in_features)
    lora_b = torch.randn(sum(p.out_features for p in pieces), RANK)
    tensors = to_hf(pieces, lora_a, lora_b)
    shapes, aliases = wire_names(pieces)
    assert {n: tuple(RANK if s < 0 else s for s in shape) for n, shape in shapes.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    assert not aliases.keys() & shapes.keys()
    assert set(aliases.values()) <= shapes.keys()
    again = to_megatron(pieces, tensors)
    assert torch.equal(again[0], lora_a)
    assert torch.equal(again[1], lora_b)
    assert all(t.is_contiguous() for t in tensors.values())
    assert tensors[next(iter(tensors))].data_ptr() != lora_a.data_ptr()


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_names_of_a_family_are_unique(kind: str) -> None:
    family = FAMILIES[kind]
    dims = dims_of(kind)
    sites = family.sites(dims, range(3), ExpertLayout.PER_EXPERT)
    names = [n for key in sites for n in wire_names(family.pieces(dims, key))[0]]
    assert len(names) == len(set(names))


def test_refusals() -> None:
    moe, dense = family_for("qwen3_moe"), family_for("qwen3")
    with pytest.raises(UnknownTensorError, match="expert 4"):
        moe.pieces(DIMS, SiteKey(linear="linear_fc1", layer=0, scope=Scope.EXPERT, expert=4))
    with pytest.raises(UnknownTensorError, match="no experts"):
        dense.pieces(DENSE, SiteKey(linear="linear_fc1", layer=0, scope=Scope.EXPERT, expert=0))
    with pytest.raises(ConfigError, match="qwen3"):
        family_for("gpt2")
    pieces = dense.pieces(DENSE, SiteKey(linear="linear_proj", layer=0, scope=Scope.ATTENTION))
    with pytest.raises(UnknownTensorError, match="lora_A"):
        to_megatron(pieces, {})
    tensors = to_hf(pieces, torch.zeros(RANK, 18), torch.zeros(8, RANK))
    tensors["model.layers.0.self_attn.o_proj.lora_B.weight"] = torch.zeros(7, RANK)
    with pytest.raises(AdapterError, match="shape"):
        to_megatron(pieces, tensors)

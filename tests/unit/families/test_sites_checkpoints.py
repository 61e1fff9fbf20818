"""Every family against what transformers writes, and both directions of the conversion for random sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open

from areal_lora.families.family import Scope, covers
from areal_lora.families.registry import FAMILIES, target_of
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.families.sites import adapter_size, pieces_of, sites_of, wire_names
from areal_lora.families.targets import resolve
from areal_lora.types import AdapterSpec, ExpertLayout
from tests.support.families.conversion import to_hf, to_megatron
from tests.support.families.shapes import make_shape
from tests.support.families.tiny_families import TINY, save

ORDER = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SCOPES = [Scope.ATTENTION, Scope.MLP, Scope.SHARED_EXPERT, Scope.EXPERT, Scope.ALL_EXPERTS]


@pytest.fixture(scope="module", params=sorted(FAMILIES.rows))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp("families"))


def linears_of(path: Path) -> dict[str, tuple[int, int]]:
    """Every matrix of the checkpoint's layers that is not a router or a gate: module name and [out, in]."""
    found = {}
    with safe_open(path / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            module = name.removesuffix(".weight")
            shape = tuple(file.get_slice(name).get_shape())
            if ".layers." in name and len(shape) == 2 and not module.endswith((".gate", ".shared_expert_gate")):
                found[module] = shape
    return found


@pytest.mark.parametrize("layout", ExpertLayout)
def test_names_and_sizes_are_those_of_the_checkpoint(checkpoint: Path, layout: ExpertLayout) -> None:
    """The pieces cover exactly the linear layers that transformers saves, each once."""
    shape = ModelShape.from_hf(read_hf_config(checkpoint))
    pieces = [p for key in sites_of(shape, layout) for p in pieces_of(shape, key)]
    named = [(name, (p.out_features, p.in_features)) for p in pieces for name in (p.name, *p.aliases)]
    assert len(named) == len(dict(named))
    assert dict(named) == linears_of(checkpoint)


@pytest.mark.parametrize("layout", ExpertLayout)
def test_targets_of_names_agree_with_the_sites(checkpoint: Path, layout: ExpertLayout) -> None:
    """Server and trainer derive the same layer and scope from a name, for every choice of targets."""
    hf = read_hf_config(checkpoint)
    shape = ModelShape.from_hf(hf)
    choices = [("all-linear",), ("experts",), ("mlp",), ("shared_expert",), ("attention", "linear_fc2")]
    for key in sites_of(shape, layout):
        for piece in pieces_of(shape, key):
            for name in (piece.name, *piece.aliases):
                found = target_of(name)
                assert found == (key.linear, Scope.EXPERT if key.scope is Scope.ALL_EXPERTS else key.scope)
                for choice in choices:
                    if {"experts": shape.experts, "mlp": shape.dense_layers, "shared_expert": shape.shared_ffn}.get(
                        choice[0], 1
                    ):
                        targets = resolve(choice, [], shape)
                        assert covers(targets, *found) == key.covered(targets)


@pytest.mark.parametrize("excluded", [[], ["attention"], ["linear_fc2"]])
@pytest.mark.parametrize("layout", ExpertLayout)
def test_size_of_an_adapter(checkpoint: Path, layout: ExpertLayout, excluded: list[str]) -> None:
    """`adapter_size`, which knows no names, against counting the wire tensors."""
    hf = read_hf_config(checkpoint)
    shape, rank = ModelShape.from_hf(hf), 3
    targets = resolve(["all-linear"], excluded, shape)
    names = [wire_names(pieces_of(shape, key)) for key in sites_of(shape, layout) if key.covered(targets)]
    count = {n: -rank * s[0] * s[1] for shapes, _ in names for n, s in shapes.items()}
    aliases = {alias: name for _, shared in names for alias, name in shared.items()}
    size = adapter_size(
        shape, AdapterSpec(name="a", base_model="m", rank=rank, alpha=1.0, target_modules=targets, expert_layout=layout)
    )
    assert (size.tensors, size.names) == (len(count), len(count) + len(aliases))
    assert size.parameters == sum(count.values())
    assert size.file_parameters == size.parameters + sum(count[name] for name in aliases.values())


@pytest.mark.parametrize("kind", sorted(FAMILIES.rows))
@settings(max_examples=25, deadline=None, print_blob=True)
@given(data=st.data())
def test_there_and_back_is_exact(kind: str, data: Any) -> None:
    draw = data.draw
    group, kv_heads, layers = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, 4)) if "num_experts_per_tok" in TINY[kind] else 0
    shape = make_shape(
        kind,
        layers=layers,
        hidden=draw(st.integers(1, 9)),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)),
        ffn=draw(st.integers(1, 9)),
        expert_ffn=draw(st.integers(1, 9)),
        experts=experts,
        shared_ffn=draw(st.integers(0, 5)) if kind == "qwen2_moe" else 0,
        dense=draw(st.sets(st.integers(0, 2))) if experts and kind != "mixtral" else (),
    )
    torch.manual_seed(seed := draw(st.integers(0, 2**31)))
    print(f"seed {seed}")
    rank, wire = draw(st.integers(1, 4)), dict[str, torch.Tensor]()
    keys = sites_of(shape, draw(st.sampled_from([ExpertLayout.PER_EXPERT, ExpertLayout.SHARED])))
    assert keys == sorted(keys, key=lambda k: (k.layer, SCOPES.index(k.scope), ORDER.index(k.linear), k.expert or 0))
    truth = {}
    for key in keys:
        pieces = pieces_of(shape, key)
        truth[key] = (torch.randn(rank, pieces[0].in_features), torch.randn(sum(p.out_features for p in pieces), rank))
        tensors = to_hf(pieces, *truth[key])
        shapes = {n: tuple(rank if d < 0 else d for d in s) for n, s in wire_names(pieces)[0].items()}
        assert {n: tuple(t.shape) for n, t in tensors.items()} == shapes
        assert not wire.keys() & tensors.keys()
        wire |= tensors
    for key, (lora_a, lora_b) in truth.items():
        again = to_megatron(pieces_of(shape, key), wire)
        assert torch.equal(again[0], lora_a)
        assert torch.equal(again[1], lora_b)

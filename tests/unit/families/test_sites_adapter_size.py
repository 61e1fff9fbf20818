"""Adapter sizes against published figures, and against counting one by one."""

from __future__ import annotations

import itertools
import json

import pytest

from areal_lora.families.family import TARGETS
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import adapter_size
from areal_lora.types import AdapterSpec
from tests.support.paths import TINY_MODEL


def spec(rank: int, targets: tuple[str, ...]) -> AdapterSpec:
    return AdapterSpec(name="a", base_model="m", rank=rank, alpha=16.0, target_modules=targets)


def test_names_of_the_30b_adapter() -> None:
    # 48 layers x (4 attention projections + 128 experts x 3) x (A and B); 1.69 GB in bf16 at rank 16.
    size = adapter_size(ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {}), spec(16, TARGETS))
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
    shape = ModelShape.from_hf(json.loads((TINY_MODEL / "config.json").read_text()))
    rank = 8
    rows = [row for row in hf_linears(shape) if row[0] in targets]
    # A lora_A is shared by the projections that are fused into one Megatron module.
    shared = {(target, name.rpartition(".")[0], n_in) for target, name, n_in, _ in rows}
    size = adapter_size(shape, spec(rank, targets))
    assert size.names == 2 * len(rows)
    assert size.tensors == len(rows) + len(shared)
    assert size.file_parameters == sum(rank * (n_in + n_out) for _, _, n_in, n_out in rows)
    assert size.parameters == sum(rank * n_out for *_, n_out in rows) + sum(rank * n_in for *_, n_in in shared)

"""Writing received tensors into stacked slots, with the parts that tensor and expert parallel workers hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_lora.engine.vllm_ext.lora_install import Matrix, StackedSlotWriter, to_bfloat16
from areal_lora.errors import ManifestError
from areal_lora.types import AdapterSpec

P = "model.layers.0.self_attn."
MAX_RANK, SLOTS = 8, 3


def spec(rank: int = 4, targets: tuple[str, ...] = ("linear_qkv", "linear_proj")) -> AdapterSpec:
    return AdapterSpec(name="a", base_model="m", rank=rank, alpha=8.0, target_modules=targets)


def worker(tp_rank: int, dtype: torch.dtype = torch.float32) -> tuple[StackedSlotWriter, dict[str, torch.Tensor]]:
    """Worker ``tp_rank`` of two: q_proj splits lora_B's rows, o_proj splits lora_A's columns."""
    buffers = {
        P + "q_proj.lora_A.weight": torch.full((SLOTS, MAX_RANK, 10), 9.0, dtype=dtype),
        P + "q_proj.lora_B.weight": torch.full((SLOTS, 6, MAX_RANK), 9.0, dtype=dtype),
        P + "o_proj.lora_A.weight": torch.full((SLOTS, MAX_RANK, 6), 9.0, dtype=dtype),
        P + "o_proj.lora_B.weight": torch.full((SLOTS, 10, MAX_RANK), 9.0, dtype=dtype),
    }
    where = {P + "q_proj.lora_B.weight": (6 * tp_rank, 12), P + "o_proj.lora_A.weight": (6 * tp_rank, 12)}
    matrices = []
    for name, stacked in buffers.items():
        begin, full = where.get(name, (0, 10))
        matrices.append(Matrix(name=name, stacked=stacked, begin=begin, full=full))
    return StackedSlotWriter(matrices, MAX_RANK), buffers


def test_expected_lists_the_targets_at_the_rank_asked_for() -> None:
    writer, _ = worker(0)
    assert writer.expected(spec()) == {
        P + "q_proj.lora_A.weight": (4, 10), P + "q_proj.lora_B.weight": (12, 4),
        P + "o_proj.lora_A.weight": (4, 12), P + "o_proj.lora_B.weight": (10, 4),
    }
    only_proj = writer.expected(spec(targets=("linear_proj",)))
    assert set(only_proj) == {P + "o_proj.lora_A.weight", P + "o_proj.lora_B.weight"}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(spec(rank=9), "rank"), (spec(targets=("linear_fc1",)), "targets"), (spec(targets=("linear_typo",)), "targets"),
     (spec(targets=()), "targets")],
)
def test_what_cannot_be_served_is_refused(bad: AdapterSpec, reason: str) -> None:
    with pytest.raises(ManifestError) as e:
        worker(0)[0].expected(bad)
    assert e.value.reason == reason


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_each_worker_takes_its_part_and_nothing_else_changes(tp_rank: int) -> None:
    writer, buffers = worker(tp_rank)
    rng = np.random.default_rng(0)
    full = {n: rng.standard_normal(s).astype(np.float32) for n, s in writer.expected(spec()).items()}
    writer.zero(1)
    for name, tensor in full.items():
        writer.write(1, name, tensor, 2.0 if "lora_B" in name else 1.0)
    part = slice(6 * tp_rank, 6 * tp_rank + 6)
    q_a, q_b = full[P + "q_proj.lora_A.weight"], full[P + "q_proj.lora_B.weight"]
    assert np.array_equal(buffers[P + "q_proj.lora_A.weight"][1, :4].numpy(), q_a)
    assert np.array_equal(buffers[P + "q_proj.lora_B.weight"][1, :, :4].numpy(), 2 * q_b[part])
    assert np.array_equal(buffers[P + "o_proj.lora_A.weight"][1, :4].numpy(), full[P + "o_proj.lora_A.weight"][:, part])
    for name, t in buffers.items():
        rest = t[1, 4:] if "lora_A" in name else t[1, :, 4:]
        assert rest.abs().max() == 0, "the rest of the rank must be zero"
        assert bool((t[[0, 2]] == 9.0).all()), "other slots must not change"


def test_experts_of_another_worker_are_expected_but_not_written() -> None:
    name = "model.layers.0.mlp.experts.{}.down_proj.lora_B.weight"
    held = torch.zeros(SLOTS, 10, MAX_RANK)
    matrices = [Matrix(name=name.format(e), stacked=t, begin=0, full=10) for e, t in enumerate((held, None))]
    writer = StackedSlotWriter(matrices, MAX_RANK)
    assert len(writer.expected(spec(targets=("linear_fc2",)))) == 2
    writer.write(0, name.format(1), np.ones((10, 4), np.float32), 1.0)
    assert held.abs().max() == 0


def test_bfloat16_slots_round_to_nearest_even() -> None:
    print("seed 4")
    values = np.random.default_rng(4).standard_normal((64, 64)).astype(np.float32)
    want = torch.from_numpy(values).bfloat16()
    assert torch.equal(torch.from_numpy(to_bfloat16(values)).view(torch.bfloat16), want)
    writer, buffers = worker(0, torch.bfloat16)
    tensor = values[:4, :10].copy()
    writer.write(2, P + "q_proj.lora_A.weight", tensor, 1.0)
    assert torch.equal(buffers[P + "q_proj.lora_A.weight"][2, :4], want[:4, :10])

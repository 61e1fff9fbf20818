"""Writing received tensors into stacked slots, with the parts that tensor and expert parallel workers hold."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_lora.engine.base import DTYPES
from areal_lora.errors import AdapterError, ManifestError
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.layout import AdapterLayout
from tests.support.engine.vllm_ext.slots import Full, install, layout_of
from tests.support.lazy import Lazy

lora_install = Lazy("areal_lora.engine.vllm_ext.worker.lora_install")
weights = Lazy("areal_lora.engine.vllm_ext.compat.weights")

ATTENTION, EXPERT = "model.layers.0.self_attn.", "model.layers.0.mlp.experts.{}.down_proj"
MAX_RANK, SLOTS, ALPHA = 8, 3, 8.0


@pytest.fixture(params=[False, True], ids=["compiled", "strided"])
def on_device(request: pytest.FixtureRequest) -> bool:
    """The way of a device, which tensors on the host take as well."""
    return bool(request.param)


def spec(rank: int = 4, targets: tuple[str, ...] = ("linear_qkv", "linear_proj")) -> AdapterSpec:
    return AdapterSpec(name="a", base_model="m", rank=rank, alpha=ALPHA, target_modules=targets)


def worker(
    tp_rank: int, dtype: torch.dtype = torch.float32, on_device: bool = False
) -> tuple[lora_install.StackedSlotWriter, dict[str, torch.Tensor]]:
    """Worker ``tp_rank`` of two: q_proj splits lora_B's rows, o_proj splits lora_A's columns."""
    buffers = {
        ATTENTION + "q_proj.lora_A.weight": torch.full((SLOTS, 1, MAX_RANK, 10), 9.0, dtype=dtype),
        ATTENTION + "q_proj.lora_B.weight": torch.full((SLOTS, 1, 6, MAX_RANK), 9.0, dtype=dtype),
        ATTENTION + "o_proj.lora_A.weight": torch.full((SLOTS, 1, MAX_RANK, 6), 9.0, dtype=dtype),
        ATTENTION + "o_proj.lora_B.weight": torch.full((SLOTS, 1, 10, MAX_RANK), 9.0, dtype=dtype),
    }
    half = (6 * tp_rank, 12)
    split = {ATTENTION + "q_proj.lora_B.weight": half, ATTENTION + "o_proj.lora_A.weight": half}
    matrices = []
    for name, stacked in buffers.items():
        begin, full = split.get(name, (0, 10))
        matrices.append(weights.Matrix(name=name, stacked=stacked, index=0, start=begin, full=full))
    return lora_install.StackedSlotWriter(matrices, MAX_RANK, on_device=on_device), {
        name: t[:, 0] for name, t in buffers.items()
    }


def values(writer: lora_install.StackedSlotWriter, s: AdapterSpec, seed: int = 0) -> Full:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in writer.expected(s).items()}


def test_expected_lists_the_targets_at_the_rank_asked_for() -> None:
    writer, _ = worker(0)
    assert writer.expected(spec()) == {
        ATTENTION + "q_proj.lora_A.weight": (4, 10),
        ATTENTION + "q_proj.lora_B.weight": (12, 4),
        ATTENTION + "o_proj.lora_A.weight": (4, 12),
        ATTENTION + "o_proj.lora_B.weight": (10, 4),
    }
    for targets in (("linear_proj",), ("attention.linear_proj",)):
        only_proj = writer.expected(spec(targets=targets))
        assert set(only_proj) == {ATTENTION + "o_proj.lora_A.weight", ATTENTION + "o_proj.lora_B.weight"}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (spec(rank=9), "rank"),
        (spec(targets=("linear_fc1",)), "targets"),
        (spec(targets=("linear_typo",)), "targets"),
        (spec(targets=("linear_qkv", "expert.linear_fc1")), "targets"),
        (spec(targets=()), "targets"),
    ],
)
def test_what_cannot_be_served_is_refused(bad: AdapterSpec, reason: str) -> None:
    with pytest.raises(ManifestError) as e:
        worker(0)[0].expected(bad)
    assert e.value.reason == reason


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3)])
def test_each_worker_takes_its_part_and_nothing_else_changes(
    tp_rank: int, cuts: tuple[int, ...], on_device: bool
) -> None:
    writer, buffers = worker(tp_rank, on_device=on_device)
    full = values(writer, spec())
    install(writer, 1, layout_of(full, spec()), full, cuts)
    part = slice(6 * tp_rank, 6 * tp_rank + 6)
    q_a, q_b = full[ATTENTION + "q_proj.lora_A.weight"], full[ATTENTION + "q_proj.lora_B.weight"]
    o_a = full[ATTENTION + "o_proj.lora_A.weight"]
    assert np.array_equal(buffers[ATTENTION + "q_proj.lora_A.weight"][1, :4].numpy(), q_a)
    assert np.array_equal(buffers[ATTENTION + "q_proj.lora_B.weight"][1, :, :4].numpy(), 2 * q_b[part])
    assert np.array_equal(buffers[ATTENTION + "o_proj.lora_A.weight"][1, :4].numpy(), o_a[:, part])
    for name, t in buffers.items():
        rest = t[1, 4:] if "lora_A" in name else t[1, :, 4:]
        assert rest.abs().max() == 0, "the rest of the rank must be zero"
        assert bool((t[[0, 2]] == 9.0).all()), "other slots must not change"


def test_ranks_and_scales_of_single_modules(on_device: bool) -> None:
    writer, buffers = worker(1, on_device=on_device)
    one = replace(spec(), rslora=True, rank_pattern=(("o_proj", 1),), alpha_pattern=(("q_proj", 6.0),))
    install(writer, 0, layout_of(wide := values(writer, spec(rank=8)), spec(rank=8)), wide)
    full = values(writer, one, seed=3)
    install(writer, 0, layout_of(full, one), full)
    q_b, o_b = (full[ATTENTION + f"{leaf}_proj.lora_B.weight"] for leaf in "qo")
    assert (q_b.shape, o_b.shape) == ((12, 4), (10, 1))
    assert np.array_equal(buffers[ATTENTION + "q_proj.lora_B.weight"][0, :, :4].numpy(), 3 * q_b[6:])  # 6 / sqrt 4
    assert np.array_equal(buffers[ATTENTION + "o_proj.lora_B.weight"][0, :, :1].numpy(), 8 * o_b)
    assert buffers[ATTENTION + "o_proj.lora_A.weight"][0, 1:].abs().max() == 0, "of the wider version before"
    assert buffers[ATTENTION + "o_proj.lora_B.weight"][0, :, 1:].abs().max() == 0
    with pytest.raises(ManifestError, match="has rank 9"):
        writer.expected(replace(one, rank_pattern=(("o_proj", 9),)))


def test_a_slot_is_cleared_only_when_something_could_show_through(on_device: bool) -> None:
    writer, buffers = worker(0, on_device=on_device)
    wide, narrow = spec(rank=8), spec(rank=2)
    first, second, third = (values(writer, s, seed) for seed, s in enumerate((wide, wide, narrow)))
    install(writer, 0, layout_of(first, wide), first)
    spare = buffers[ATTENTION + "q_proj.lora_A.weight"][0]
    plan = layout_of(second, wide)
    writer.prepare(0, plan)
    assert torch.equal(spare, torch.from_numpy(first[ATTENTION + "q_proj.lora_A.weight"])), "about to be overwritten"
    install(writer, 0, plan, second)
    install(writer, 0, layout_of(third, narrow), third)
    assert torch.equal(spare[:2], torch.from_numpy(third[ATTENTION + "q_proj.lora_A.weight"]))
    assert spare[2:].abs().max() == 0
    writer.zero(0)
    assert all(t[0].abs().max() == 0 for t in buffers.values())


def experts(n: int = 2, on_device: bool = False) -> tuple[lora_install.StackedSlotWriter, torch.Tensor, torch.Tensor]:
    """The second of two expert parallel workers: it holds every expert but 0."""
    a, b = torch.zeros(SLOTS, n - 1, MAX_RANK, 6), torch.zeros(SLOTS, n - 1, 10, MAX_RANK)
    matrices = []
    for e in range(n):
        module, held = EXPERT.format(e), e > 0
        where = {"index": max(e - 1, 0), "start": 0}
        matrices.append(weights.Matrix(name=f"{module}.lora_A.weight", stacked=a if held else None, full=6, **where))
        matrices.append(weights.Matrix(name=f"{module}.lora_B.weight", stacked=b if held else None, full=10, **where))
    return lora_install.StackedSlotWriter(matrices, MAX_RANK, on_device=on_device), a, b


def test_experts_of_another_worker_are_expected_but_not_written(on_device: bool) -> None:
    writer, a, b = experts(on_device=on_device)
    s = spec(targets=("linear_fc2",))
    full = values(writer, s)
    assert len(full) == 4
    install(writer, 2, layout_of(full, s), full)
    assert np.array_equal(a[2, 0, :4].numpy(), full[EXPERT.format(1) + ".lora_A.weight"])
    assert np.array_equal(b[2, 0, :, :4].numpy(), 2 * full[EXPERT.format(1) + ".lora_B.weight"])
    assert a[:2].abs().max() == 0
    assert b[:2].abs().max() == 0


def test_one_wire_tensor_reaches_all_its_names(on_device: bool) -> None:
    writer, a, b = experts(4, on_device)
    s = spec(targets=("expert.linear_fc2",))
    wire = {n: t for n, t in values(writer, s).items() if ".experts.0." in n}
    aliases = {n: re.sub(r"experts\.\d+", "experts.0", n) for n in writer.expected(s) if n not in wire}
    install(writer, 0, layout_of(wire, s, aliases=aliases), wire)
    for local in range(3):
        assert np.array_equal(a[0, local, :4].numpy(), wire[EXPERT.format(0) + ".lora_A.weight"])
        assert np.array_equal(b[0, local, :, :4].numpy(), 2 * wire[EXPERT.format(0) + ".lora_B.weight"])


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("slots", DTYPES.values(), ids=str)
def test_numbers_are_rounded_once_to_what_the_slots_hold(wire: str, slots: torch.dtype, on_device: bool) -> None:
    print("seed 4")
    writer, buffers = worker(0, slots, on_device)
    full = values(writer, spec(), seed=4)
    install(writer, 2, layout_of(full, spec(), wire), full)
    sent = torch.from_numpy(full[ATTENTION + "o_proj.lora_B.weight"]).to(getattr(torch, wire)).float()
    assert torch.equal(buffers[ATTENTION + "o_proj.lora_B.weight"][2, :, :4], (2 * sent).to(slots))


def test_a_layout_that_does_not_fit_is_no_plan() -> None:
    writer, _ = worker(0)
    full = values(writer, spec())
    short = full | {ATTENTION + "q_proj.lora_B.weight": full[ATTENTION + "q_proj.lora_B.weight"][:11]}
    foreign = full | {"model.layers.9.self_attn.q_proj.lora_A.weight": np.zeros((4, 10), np.float32)}
    wide = {n: np.zeros((9, t.shape[1]) if "lora_A" in n else (t.shape[0], 9), np.float32) for n, t in full.items()}
    for tensors, s, reason in ((short, spec(), "shape"), (foreign, spec(), "unknown_tensor"), (wide, spec(9), "shape")):
        with pytest.raises(ManifestError) as e:
            writer.plan(layout_of(tensors, s))
        assert e.value.reason == reason
    layout = layout_of(full, spec())
    shard = layout.shards[0]
    cut = AdapterLayout(
        structure=layout.structure,
        dtype="float32",
        shards=(type(shard)(source=0, tensors=shard.tensors, nbytes=shard.nbytes - 4),),
        aliases={},
    )
    with pytest.raises(ValueError, match="leaves its source"):
        writer.plan(cut)


def test_slots_of_another_dtype_are_an_error_at_start() -> None:
    stacked = torch.zeros(SLOTS, 1, MAX_RANK, 10, dtype=torch.float64)
    matrix = weights.Matrix(name=ATTENTION + "q_proj.lora_A.weight", stacked=stacked, index=0, start=0, full=10)
    other = replace(matrix, name="model.layers.0.mlp.gate.lora_A.weight")
    with pytest.raises(AdapterError, match="float64"):
        lora_install.StackedSlotWriter([matrix], MAX_RANK)
    with pytest.raises(AdapterError):
        lora_install.StackedSlotWriter([other], MAX_RANK)  # nothing that can be adapted


def test_targets_name_the_modules_vllm_wraps() -> None:
    assert lora_install.vllm_modules(["linear_fc1"]) == ["experts", "gate_up_proj"]
    assert lora_install.vllm_modules(["expert.linear_fc1", "linear_proj"]) == ["experts", "o_proj"]
    assert lora_install.vllm_modules(["shared_expert.linear_fc2"]) == ["down_proj"]
    assert lora_install.vllm_modules(["linear_typo"]) == []

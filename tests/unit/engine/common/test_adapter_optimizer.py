"""The optimizer of one adapter against Adam steps written by hand in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.config.models import OptimizerConfig, TrainerConfig
from areal_lora.engine.base import AdamValues
from areal_lora.engine.common import adapter_optimizer, transfer_plan
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.adapter_optimizer import AdapterOptimizer, GradientClass, copy_state
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel, spans
from areal_lora.types import AdapterSpec
from tests.support.families.shapes import make_shape

SPEC = AdapterSpec(
    name="a",
    base_model="m",
    rank=2,
    alpha=4.0,
    target_modules=("linear_qkv", "linear_proj", "linear_fc1"),
    value_head=True,
)
SHAPE = make_shape(
    "qwen3_moe", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=8, expert_ffn=4, experts=2, dense={1}
)
SEED = 11
BETAS = [(0.9, 0.95), (0.0, 0.999), (0.8, 0.5)]


@pytest.fixture(autouse=True)
def world_of_one() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def memory_of() -> AdapterMemory:
    layout = ParallelLayout.of(TrainerConfig(world_size=1), layers=SHAPE.layers, experts=SHAPE.experts)
    return AdapterMemory(ShardedModel(shape=SHAPE, layout=layout), SPEC, 0, torch.device("cpu"))


def by_hand(weights: Tensor, grads: list[Tensor], lr: Tensor, config: OptimizerConfig) -> Tensor:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) element by element in float64; ``lr`` of each element."""
    w, m, v = weights.double(), torch.zeros(weights.numel()).double(), torch.zeros(weights.numel()).double()
    first, second = config.betas
    for t, g in enumerate((g.double() for g in grads), 1):
        m = first * m + (1 - first) * g
        v = second * v + (1 - second) * g * g
        step = (m / (1 - first**t)) / ((v / (1 - second**t)).sqrt() + 1e-8)
        w = w - lr * (config.weight_decay * w + step)
    return w


@pytest.mark.parametrize(("ratio", "betas"), list(zip([1.0, 16.0, 0.25], BETAS, strict=True)))
def test_steps_have_the_configured_values(ratio: float, betas: tuple[float, float]) -> None:
    """lora_B learns ``ratio`` times as fast; nothing is clipped."""
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    config = OptimizerConfig(lr=1.0, betas=list(betas), weight_decay=0.1, max_grad_norm=None, lora_plus_ratio=ratio)
    memory = memory_of()
    memory.weights.copy_(torch.randn(memory.arena.size, generator=generator))
    optimizer = AdapterOptimizer(config, memory, [GradientClass(start=0, end=memory.arena.size, groups=[])])
    lr = torch.full((memory.arena.size,), math.nan).double()
    for bank in memory.arena.banks:  # of each matrix, from where it lies
        lr[bank.a : bank.a + math.prod(bank.a_shape)] = 0.01
        lr[bank.b : bank.b + math.prod(bank.b_shape)] = 0.01 * ratio
    assert memory.arena.head is not None
    lr[memory.arena.head : memory.arena.head + SHAPE.hidden + 1] = 0.01
    before = memory.weights.clone()
    grads = [torch.randn(memory.arena.size, generator=generator) for _ in range(2)]
    for grad in grads:
        memory.grads.copy_(3 * grad)
        stats = optimizer.step(3.0, 0.01).values
    expected = by_hand(before, grads, lr, config)
    used = ~lr.isnan()
    assert used[: memory.arena.head + SHAPE.hidden + 1].all(), "zeros fill up the end alone"
    torch.testing.assert_close(memory.weights[used].double(), expected[used], atol=2e-7, rtol=1e-6)
    assert (memory.weights - before).abs().min() > 0, "every element moved"
    assert stats["lr"] == 0.01
    assert stats["grad_norm"] == pytest.approx(float(grads[1].double().norm()), rel=1e-6)
    assert not memory.grads.any()


def test_steps_are_those_of_torch_bit_for_bit() -> None:
    """With values that change from step to step, and decay; torch's optimizer has one parameter for each rate."""
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    memory = memory_of()
    memory.weights.copy_(torch.randn(memory.arena.size, generator=generator))
    parts = spans(memory.arena, apart=True)
    whole = [GradientClass(start=0, end=memory.arena.size, groups=[])]
    ours = AdapterOptimizer(OptimizerConfig(lr=0.01, lora_plus_ratio=4.0), memory, whole)
    theirs = [torch.nn.Parameter(memory.weights[part.start : part.end].clone()) for part in parts]
    adam = torch.optim.AdamW([{"params": [weights]} for weights in theirs], foreach=True)
    for step in range(4):
        values = AdamValues(
            beta1=0.9 - 0.1 * step, beta2=0.999 - 0.05 * step, eps=1e-8, weight_decay=0.1 * step, max_grad_norm=None
        )
        grads, lr = torch.randn(memory.arena.size, generator=generator), 0.01 / (step + 1)
        memory.grads.copy_(grads)
        ours.step(1.0, lr, values)
        for part, weights, group in zip(parts, theirs, adam.param_groups, strict=True):
            weights.grad = grads[part.start : part.end].clone()
            group |= {"lr": lr * (4.0 if part.is_b else 1.0), "betas": (values.beta1, values.beta2)}
            group |= {"eps": values.eps, "weight_decay": values.weight_decay}
        adam.step()
        assert torch.equal(memory.weights, torch.cat([weights.detach() for weights in theirs])), f"step {step}"


def test_the_clock_is_that_of_every_weight() -> None:
    config = OptimizerConfig(lr=0.1, max_grad_norm=1e9, lora_plus_ratio=4.0)
    two = []
    for _ in range(2):
        memory = memory_of()
        whole = [GradientClass(start=0, end=memory.arena.size, groups=[])]
        two.append((memory, AdapterOptimizer(config, memory, whole)))
    (one, first), (other, second) = two
    for _ in range(3):
        one.grads.fill_(1.0)
        first.step(1.0, 0.1)
    other.weights.copy_(one.weights)
    for name, moment in first.moments.items():
        second.load_moment(name, moment)
    second.step_count = 3
    for memory, optimizer in two:
        memory.grads.fill_(-0.5)
        optimizer.step(1.0, 0.1)
    assert torch.equal(one.weights, other.weights)


def test_a_copy_without_moments_has_the_weights_and_the_clock() -> None:
    memory = memory_of()
    whole = [GradientClass(start=0, end=memory.arena.size, groups=[])]
    optimizer = AdapterOptimizer(OptimizerConfig(lr=0.1), memory, whole)
    memory.grads.fill_(1.0)
    optimizer.step(1.0, 0.1)
    (state, copying), (other, rest) = (copy_state(memory, optimizer, {}, moments=kept) for kept in (True, False))
    assert list(itertools.chain(copying, rest))
    assert (state.parts.keys(), other.parts.keys()) == ({"weight", "exp_avg", "exp_avg_sq"}, {"weight"})
    assert state.step == other.step == 1
    assert state.parts["weight"].tobytes() == other.parts["weight"].tobytes()


def test_spans_cover_the_memory_once() -> None:
    arena = memory_of().arena
    (whole,) = spans(arena, apart=False)
    assert (whole.start, whole.end) == (0, arena.size)
    apart = spans(arena, apart=True)
    assert [span.start for span in apart] == [0, *(span.end for span in apart[:-1])]
    assert apart[-1].end == arena.size
    assert all(one.is_b != other.is_b for one, other in itertools.pairwise(apart)), "as few as possible"


def test_a_state_is_copied_in_as_many_slices_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ranks send more or less than others, or nothing; a slice is little more than its size."""
    monkeypatch.setattr(adapter_optimizer, "SLICE_BYTES", 1 << 16)
    monkeypatch.setattr(transfer_plan, "SECTION_BYTES", 1 << 14)
    shape = make_shape(
        "qwen3_moe", layers=5, experts=4, hidden=128, heads=4, kv_heads=1, head_dim=64, ffn=0, expert_ffn=48
    )
    place = ParallelLayout.of(TrainerConfig(world_size=4, pp=2, pp_layers=(4, 1)), layers=5, experts=4)
    spec = AdapterSpec(
        name="a", base_model="m", rank=16, alpha=32, target_modules=("linear_qkv", "linear_fc1", "linear_fc2")
    )
    slices, sizes = set[int](), list[int]()
    for rank in range(4):
        memory = AdapterMemory(ShardedModel(shape=shape, layout=place), spec, rank, torch.device("cpu"))
        memory.weights.normal_()
        state, copying = copy_state(memory, None, {})
        found, counts = state.parts["weight"], [0]
        found.fill(np.nan)
        for _ in copying:
            counts.append(np.count_nonzero(~np.isnan(found)) * 4)
        slices.add(len(counts))
        sizes.append(found.nbytes)
        assert counts[-1] == found.nbytes
        assert max(np.diff(counts)) < (1 << 16) + (1 << 15)
        want = (
            torch.cat([x.flatten() for _, x in memory.packer("float32").tensors(memory.weights, {})])
            if len(found)
            else torch.empty(0)
        )
        assert found.tobytes() == want.numpy().tobytes()
    assert len(slices) == 1
    assert sizes[0] > 3 * sizes[2] > sizes[1] == sizes[3] == 0

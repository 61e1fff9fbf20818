"""What each of four ranks with replicas of one adapter does: steps, with its own gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from areal_lora.checkpoint.state import MOMENTS
from areal_lora.config.models import OptimizerConfig, TrainerConfig
from areal_lora.engine.common import adapter_optimizer
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.adapter_optimizer import AdapterOptimizer, GradientClass
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.types import AdapterSpec
from tests.support.families.shapes import make_shape

WORLD, STEPS, SKIPPED = 4, 4, 2
SLICE_BYTES = 256
CONFIG = OptimizerConfig(lr=0.01, eps=1e-3, weight_decay=0.1, max_grad_norm=30.0, lora_plus_ratio=4.0)
SHAPE = make_shape("qwen3", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=8)
SPEC = AdapterSpec(name="a", base_model="m", rank=3, alpha=4.0, target_modules=("linear_qkv", "linear_fc1"))


def make_memory(spec: AdapterSpec = SPEC) -> AdapterMemory:
    """Its size is a multiple of `WORLD`; weights of a fixed seed."""
    layout = ParallelLayout.of(TrainerConfig(world_size=WORLD), layers=SHAPE.layers, experts=0)
    memory = AdapterMemory(ShardedModel(shape=SHAPE, layout=layout), spec, 0, torch.device("cpu"))
    memory.weights.copy_(torch.randn(memory.arena.size, generator=torch.Generator().manual_seed(1)))
    return memory


def gradient(rank: int, step: int, size: int) -> torch.Tensor:
    """Small whole numbers: sums over ranks are exact in every order. One rank's is not finite in step `SKIPPED`."""
    found = torch.randint(-9, 10, (size,), generator=torch.Generator().manual_seed(10 * step + rank)).float()
    if (rank, step) == (3, SKIPPED):
        found[-1] = torch.nan
    return found


def whole(optimizer: AdapterOptimizer, name: str) -> tuple[torch.Tensor, int]:
    """The moment, and in how many slices it came."""
    with mock.patch.object(adapter_optimizer, "SLICE_BYTES", SLICE_BYTES):
        moment, filling = optimizer.whole_moment(name)
        return moment, sum(1 for _ in filling)


def stages(pair: dist.ProcessGroup) -> int:
    """Slices of a moment that two ranks share, of two pairs with memory of two sizes, which number it in order."""
    spec = SPEC if dist.get_rank() < 2 else replace(SPEC, target_modules=("linear_fc1",))
    memory = make_memory(spec)
    optimizer = AdapterOptimizer(CONFIG, memory, [GradientClass(start=0, end=memory.arena.size, groups=[pair])])
    own = optimizer.moments["exp_avg"]
    own.copy_(torch.arange(len(own)) + len(own) * dist.get_rank(pair))
    moment, slices = whole(optimizer, "exp_avg")
    assert moment.tolist() == list(range(memory.arena.size))
    return slices


def share_steps() -> dict[str, Any]:
    """Half of the memory is summed over pairs of ranks and then across the pairs, the rest over all at once."""
    rank, memory = dist.get_rank(), make_memory()
    pairs, across = ([dist.new_group(each) for each in found] for found in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    middle = memory.arena.size // 2 // WORLD * WORLD
    world: Any = dist.group.WORLD
    classes = [
        GradientClass(start=0, end=middle, groups=[pairs[rank // 2], across[rank % 2]]),
        GradientClass(start=middle, end=memory.arena.size, groups=[world]),
    ]
    optimizer = AdapterOptimizer(CONFIG, memory, classes)
    stats = []
    for step in range(STEPS):
        memory.grads.copy_(gradient(rank, step, memory.arena.size))
        stats.append(optimizer.step(1.0, 0.01).values)
    moments = {name: whole(optimizer, name)[0] for name in MOMENTS}
    held = {name: len(moment) for name, moment in optimizer.moments.items()}
    for name, moment in moments.items():
        optimizer.load_moment(name, 2 * moment)
    doubled = {name: whole(optimizer, name)[0].numpy() for name in MOMENTS}
    return {
        "stats": stats,
        "weights": memory.weights.numpy(),
        "moments": {name: moment.numpy() for name, moment in moments.items()},
        "held": held,
        "slices": stages(pairs[rank // 2]),
        "doubled": doubled,
        "left": bool(memory.grads.any()),
    }

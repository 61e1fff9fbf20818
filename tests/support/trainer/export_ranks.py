"""What each rank of an export test does: an adapter's memory without a model, filled, then exported to one folder."""

from __future__ import annotations

import ctypes
import hashlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.config.models import TrainerConfig
from areal_lora.distributed.store import Exchange
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.adapter_optimizer import copy_state
from areal_lora.engine.common.arena import ParallelLayout, Range, ShardedModel
from areal_lora.engine.common.transfer_plan import wire_layout
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.errors import PublishError
from areal_lora.families.shape import ModelShape
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.versions.checkpointing import export_adapter
from areal_lora.types import AdapterSpec, ExpertLayout
from areal_lora.weight_sync.layout import AdapterLayout
from tests.support.families.shapes import make_shape

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LAYERS = 8
SMALL = make_shape(
    "qwen3_moe", layers=LAYERS, hidden=24, heads=24, kv_heads=2, head_dim=2, ffn=24, expert_ffn=24, experts=8, dense=[1]
)
LARGE = make_shape(
    "qwen3_moe", layers=LAYERS, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=2048, expert_ffn=512, experts=32
)


def model(shape: ModelShape, sizes: Mapping[str, int]) -> ShardedModel:
    layout = ParallelLayout.of(TrainerConfig(**sizes), layers=LAYERS, experts=shape.experts)
    return ShardedModel(shape=shape, layout=layout)


def spec(rank: int, experts: ExpertLayout) -> AdapterSpec:
    return AdapterSpec(name="a", base_model="b", rank=rank, alpha=8.0, target_modules=TARGETS, expert_layout=experts)


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """A wire tensor, by its name only."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Engine:
    """The verbs that an export uses, on an adapter without a model."""

    def __init__(self, it: ShardedModel, spec: AdapterSpec) -> None:
        self.rank = dist.get_rank()
        self.memory = AdapterMemory(it, spec, self.rank, torch.device("cpu"))
        groups = {}
        for part, size in ((Range.DENSE_SPLIT, it.layout.tp), (Range.EXPERT_SPLIT, it.layout.etp)):
            for first in range(0, it.layout.world, size):
                group = dist.new_group(list(range(first, first + size)))
                if self.rank in range(first, first + size):
                    groups[part] = group
        self._model = SimpleNamespace(groups=groups)
        shapes = {t.name: t.shape for shard in self.memory.layout("float32").shards for t in shard.tensors}
        held = {name: values(name, shapes[name]) for name in self.memory.held[0]}
        self.memory.load(self.memory.weights, held)

    def resident(self, name: str) -> Any:
        return SimpleNamespace(memory=self.memory)

    def adapter_layout(self, adapter: str, dtype: str = "float32") -> AdapterLayout:
        return self.memory.layout(dtype)

    export_adapter = MegatronEngine.export_adapter


def memory_bytes(key: str) -> int:
    [line] = [row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key)]
    return int(line.split()[1]) * 1024


def export_all(folder: Path, cases: list[tuple[str, ModelShape, dict[str, int], int, ExpertLayout]]) -> dict[str, Any]:
    """By case, how much more memory this rank has held during the export than before it."""
    exchange, grown = Exchange(timeout_s=150.0), {}
    for name, shape, sizes, rank, experts in cases:
        engine: Any = Engine(model(shape, sizes), spec(rank, experts))
        adapter: Any = SimpleNamespace(name="a", spec=spec(rank, experts), base_commit=None)
        # As after a checkpoint: the plans of the engine exist.
        deque(copy_state(engine.memory, None, engine._model.groups)[1], maxlen=0)
        dist.barrier()
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed and kept would hide new allocations
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_bytes("VmRSS")
        export_adapter(engine, adapter, exchange, RunFolder(folder / name))
        grown[name] = memory_bytes("VmHWM") - before
        dist.barrier()
    return grown


def whole(shape: ModelShape, rank: int, experts: ExpertLayout) -> dict[str, Tensor]:
    """What the file must hold, by name in it."""
    layout = wire_layout(model(shape, {"world_size": 1}), spec(rank, experts), "float32")
    wire = {t.name: values(t.name, t.shape) for shard in layout.shards for t in shard.tensors}
    wire |= {name: wire[target].clone() for name, target in layout.aliases.items()}
    return {f"base_model.model.{name}": tensor for name, tensor in wire.items()}


def lose_a_rank(folder: Path) -> str:
    """What rank 0 reports when rank 1 ends before it has sent anything."""
    exchange = Exchange(timeout_s=150.0)
    dist.barrier()  # rank 1 must not end while rank 0 still connects
    if exchange.rank == 0:
        try:
            exchange.receive(np.empty(1 << 20, dtype=np.uint8), 1)
        except PublishError as error:
            return str(error)
    return ""

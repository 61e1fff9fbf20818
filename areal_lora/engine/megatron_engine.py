"""The Megatron engine: one rank of a Megatron-core model with a LoRA adapter.

A batch goes through Megatron's own pipeline schedule as rows [b, s]; see `rows` for why the
results do not depend on the padding. Layout, conversion, optimizer and the frozen base have
files of their own in `megatron_utils`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.checkpoint.state import PARTS, AdapterState
from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.data.collate import HOST
from areal_lora.data.packing import plan_microbatches
from areal_lora.engine.base import LossFn
from areal_lora.engine.megatron_utils.adapter_memory import AdapterMemory, checked
from areal_lora.engine.megatron_utils.arena import Range, ShardedModel
from areal_lora.engine.megatron_utils.parallel_layout import ParallelLayout, check_widths
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.platforms.megatron_cpu import install_cpu_patches
from areal_lora.types import AdapterSpec, StepStats, TrainBatch
from areal_lora.weight_sync.digests import base_digest
from areal_lora.weight_sync.layout import AdapterLayout, WireTensor


@dataclass(slots=True, kw_only=True)
class _Resident:
    """The adapter that is attached to the model."""

    spec: AdapterSpec
    memory: AdapterMemory
    optimizer: Any


class MegatronEngine:
    """`TrainEngine` on Megatron-core. Joins torch.distributed if the caller has not."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, device: torch.device) -> None:
        hf = read_hf_config(Path(model.folder))
        shape = ModelShape.from_hf(hf)
        check_widths(trainer, shape)
        layout = ParallelLayout.of(trainer, layers=shape.layers, experts=shape.experts)
        if device.type == "cpu":
            install_cpu_patches()
        # Importing these loads Megatron, which must find the patches in place.
        from areal_lora.engine.megatron_utils import base_weights, initialize, lora, rows, schedule
        from areal_lora.engine.megatron_utils import model as base
        from areal_lora.engine.megatron_utils import optimizer as optim

        self._lora, self._rows, self._schedule, self._optim = lora, rows, schedule, optim
        tp_group, etp_group = initialize.initialize_parallel(trainer, device)
        self._groups = {Range.DENSE_SPLIT: tp_group, Range.EXPERT_SPLIT: etp_group}
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._device, self._trainer, self._path, self._layout = device, trainer, model.folder, layout
        self._shape = ShardedModel(shape=shape, layout=layout)
        self._model: nn.Module = base.build_model(model, trainer, layout, hf, device)
        base_weights.load_base(self._model, model.folder, self._shape, self.rank)
        self._resident: _Resident | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def is_source(self) -> bool:
        return self._resident is not None and self._resident.memory.shard("float32") is not None

    def add_adapter(self, spec: AdapterSpec, optimizer: OptimizerConfig, seed: int) -> None:
        if self._resident is not None:
            raise ConfigError(
                "adapters",
                f"{spec.name!r} is a second adapter; the Megatron engine holds one at a time",
                "list one adapter",
            )
        if spec.dropout:
            # Scores of one policy must be repeatable (contract C10).
            raise ConfigError("adapters.dropout", f"{spec.dropout} would make log-probabilities random", "0.0")
        self._check_targets(spec)
        memory = AdapterMemory(self._shape, spec, self.rank, self._device)
        self._model = self._lora.attach(self._model, memory)
        held = set(memory.held_names())
        shards = memory.layout("float32").shards
        first = {t.name: initial_tensor(t, seed) for shard in shards for t in shard.tensors if t.name in held}
        memory.load(memory.weights, first)
        self._resident = _Resident(spec=spec, memory=memory, optimizer=self._optim.AdapterOptimizer(optimizer, memory))

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> Tensor:
        if adapter is not None:
            self._adapter(adapter)
        self._lora.set_enabled(self._model, adapter is not None)
        try:
            with torch.no_grad():
                pieces = self._run(batch, None, temperature)
        finally:
            self._lora.set_enabled(self._model, True)
        packed = torch.zeros(batch.n_tokens, device=HOST)
        bounds = batch.cu_seqlens.tolist()
        for rows, values in pieces:
            at = 0
            for sequence in rows.sequences:
                a, b = bounds[sequence], bounds[sequence + 1]
                packed[a:b] = values[at : at + b - a].cpu()
                at += b - a
        # Every token was computed by one data-parallel rank of the last stage (and its tensor-parallel copies).
        if self.rank not in self._reporting_ranks():
            packed.zero_()
        dist.all_reduce(packed)
        return packed

    def forward_backward(
        self, batch: TrainBatch, loss_fn: LossFn, *, temperature: float = 1.0, need_entropy: bool = False
    ) -> dict[str, float]:
        names = set(batch.adapters)
        if len(names) != 1:
            raise AdapterError(f"a batch names the adapters {sorted(names)}; the Megatron engine trains one at a time")
        self._adapter(next(iter(names)))
        sums: Counter[str] = Counter()
        for _, stats in self._run(batch, loss_fn, temperature, need_entropy=need_entropy):
            sums.update({name: float(value) for name, value in stats.items()})
        return self._sum_over_ranks(sums)

    def optim_step(self, adapter: str, denominator: float, lr: float) -> StepStats:
        return self._adapter(adapter).optimizer.step(denominator, lr)

    def adapter_layout(self, adapter: str, dtype: str = "float32") -> AdapterLayout:
        return self._adapter(adapter).memory.layout(dtype)

    def pack_adapter(self, adapter: str, dtype: str, flat: np.ndarray) -> Iterator[int]:
        return self._adapter(adapter).memory.pack(dtype, flat, self._groups)

    def export_adapter(self, adapter: str) -> Iterator[tuple[str, Tensor]]:
        memory = self._adapter(adapter).memory
        return memory.tensors(memory.weights, self._groups)

    def load_adapter(self, adapter: str, tensors: Mapping[str, Tensor]) -> None:
        memory = self._adapter(adapter).memory
        memory.load(memory.weights, checked(memory.layout("float32"), tensors))

    def base_digest(self) -> str:
        return base_digest(self._path)

    def export_state(self, adapter: str) -> AdapterState:
        resident = self._adapter(adapter)
        memory = resident.memory
        shard = memory.shard("float32")
        return AdapterState(
            step=resident.optimizer.step_count,
            shapes={t.name: t.shape for t in (shard.tensors if shard else ())},
            parts={part: memory.export(flat, self._groups) for part, flat in _state_of(memory).items()},
        )

    def load_state(self, adapter: str, parts: Mapping[str, Mapping[str, np.ndarray]], step: int) -> None:
        resident = self._adapter(adapter)
        memory = resident.memory
        layout, flats = memory.layout("float32"), _state_of(memory)
        whole = {
            part: checked(layout, {name: torch.from_numpy(values) for name, values in parts[part].items()})
            for part in flats
        }
        for part, flat in flats.items():
            memory.load(flat, whole[part])
        resident.optimizer.set_clock(step)

    def _check_targets(self, spec: AdapterSpec) -> None:
        sites = self._shape.every_site(spec)
        for target in spec.target_modules:
            if not any(key.covered([target]) for key in sites):
                known = ", ".join(dict.fromkeys(f"{key.scope}.{key.linear}" for key in sites))
                raise ConfigError(
                    "adapters.target_modules", f"{target!r} matches no layer of this model", f"it has {known}"
                )

    def _adapter(self, name: str) -> _Resident:
        if self._resident is None or self._resident.spec.name != name:
            raise AdapterError(f"adapter {name!r} is not resident in this engine")
        return self._resident

    def _reporting_ranks(self) -> set[int]:
        """One rank per data-parallel part that sees the loss: last stage, tensor-parallel rank 0."""
        first = self._layout.first_rank_of_last_stage()
        return {r for r in range(first, self.world_size) if self._layout.tp_rank(r) == 0}

    def _run(
        self, batch: TrainBatch, loss_fn: LossFn | None, temperature: float, *, need_entropy: bool = False
    ) -> list[tuple[Any, Any]]:
        """Every micro-batch through the schedule; (rows, result) on the last pipeline stage, else nothing."""
        layout = self._layout
        lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()
        plans = plan_microbatches(
            lengths,
            dp=layout.dp,
            token_budget=self._trainer.max_tokens_per_microbatch,
            multiple=layout.tp,
            uniform=layout.pp > 1,
        )
        dp_rank = layout.dp_rank(self.rank)

        def micro_batches() -> Iterator[Any]:
            for plan in plans:
                yield self._rows.make_rows(batch, plan, dp_rank, self._device)

        return self._schedule.run_schedule(
            self._model, micro_batches(), plans, loss_fn, temperature=temperature, need_entropy=need_entropy
        )

    def _sum_over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add up what the reporting ranks saw. Every rank learns the names from rank 0 of the last stage."""
        source = self._layout.first_rank_of_last_stage()
        names = _broadcast_names(sorted(sums), source, self.rank)
        reports = self.rank in self._reporting_ranks()
        values = torch.tensor([sums.get(n, 0.0) if reports else 0.0 for n in names], dtype=torch.float64)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))


def _broadcast_names(names: list[str], source: int, rank: int) -> list[str]:
    text = "\n".join(names).encode()
    size = torch.tensor([len(text)], dtype=torch.int64)
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if rank == source:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(data, source)
    return data.numpy().tobytes().decode().split("\n")


def _state_of(memory: AdapterMemory) -> dict[str, Tensor]:
    """The memory of each of `PARTS`."""
    flats = {"weight": memory.weights, **memory.moments}
    return {part: flats[part] for part in PARTS}


def initial_tensor(tensor: WireTensor, seed: int) -> Tensor:
    """lora_A kaiming-uniform (a = sqrt 5, PEFT's choice), lora_B zero; a function of seed and name only."""
    values = torch.zeros(tensor.shape)
    if tensor.name.endswith("lora_A.weight"):
        digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = math.sqrt(1.0 / tensor.shape[1])
        values.uniform_(-bound, bound, generator=generator)
    return values

"""The Megatron engine: one rank of a Megatron-core model with a LoRA adapter.

`megatron_utils.megatron_model` computes, `megatron_utils.adapter_memory` holds the adapter's numbers and moves
them; this file is the verbs of `TrainEngine` on both. Importing it does not import Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from areal_lora.checkpoint.state import PARTS, AdapterState
from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.engine.base import LossFn
from areal_lora.engine.initial import initial_tensor
from areal_lora.engine.megatron_utils.adapter_memory import AdapterMemory, checked
from areal_lora.engine.megatron_utils.arena import ShardedModel
from areal_lora.engine.megatron_utils.parallel_layout import ParallelLayout, check_widths
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.platforms.megatron_cpu import install_cpu_patches
from areal_lora.types import AdapterSpec, StepStats, TrainBatch
from areal_lora.weight_sync.digests import base_digest
from areal_lora.weight_sync.layout import AdapterLayout

if TYPE_CHECKING:
    from areal_lora.engine.megatron_utils.optimizer import AdapterOptimizer


@dataclass(slots=True, kw_only=True)
class _Resident:
    """The adapter that is attached to the model."""

    spec: AdapterSpec
    memory: AdapterMemory
    optimizer: AdapterOptimizer


class MegatronEngine:
    """`TrainEngine` on Megatron-core. Joins torch.distributed unless the caller has."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, device: torch.device) -> None:
        """Raises ConfigError where the parallel sizes do not fit the model."""
        hf = read_hf_config(Path(model.folder))
        shape = ModelShape.from_hf(hf)
        check_widths(trainer, shape)
        self._sharded = ShardedModel(
            shape=shape, layout=ParallelLayout.of(trainer, layers=shape.layers, experts=shape.experts)
        )
        if device.type == "cpu":
            install_cpu_patches()
        # This import loads Megatron, which must find the patches in place.
        from areal_lora.engine.megatron_utils.megatron_model import MegatronModel

        self._model = MegatronModel(model, trainer, self._sharded, hf, device)
        self.rank, self.world_size = self._model.rank, self._model.world_size
        self._device, self._path = device, model.folder
        self._groups = self._model.groups
        self._resident: _Resident | None = None

    @property
    def device(self) -> torch.device:
        return self._device

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
        _check_targets(self._sharded, spec)
        memory = AdapterMemory(self._sharded, spec, self.rank, self._device)
        adam = self._model.attach(memory, optimizer)
        held = set(memory.held_names())
        shards = memory.layout("float32").shards
        first = {t.name: initial_tensor(t, seed) for shard in shards for t in shard.tensors if t.name in held}
        memory.load(memory.weights, first)
        self._resident = _Resident(spec=spec, memory=memory, optimizer=adam)

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> Tensor:
        if adapter is not None:
            self._adapter(adapter)
        return self._model.logprobs(batch, temperature, adapted=adapter is not None)

    def forward_backward(
        self, batch: TrainBatch, loss_fn: LossFn, *, temperature: float = 1.0, need_entropy: bool = False
    ) -> dict[str, float]:
        names = set(batch.adapters)
        if len(names) != 1:
            raise AdapterError(f"a batch names the adapters {sorted(names)}; the Megatron engine trains one at a time")
        self._adapter(next(iter(names)))
        return self._model.forward_backward(batch, loss_fn, temperature, need_entropy=need_entropy)

    def optim_step(self, adapter: str, denominator: float, lr: float) -> StepStats:
        return self._adapter(adapter).optimizer.step(denominator, lr)

    def adapter_layout(self, adapter: str, dtype: str = "float32") -> AdapterLayout:
        return self._adapter(adapter).memory.layout(dtype)

    def pack_adapter(self, adapter: str, dtype: str, flat: np.ndarray) -> Iterator[int]:
        return self._adapter(adapter).memory.fill_shard(dtype, flat, self._groups)

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

    def _adapter(self, name: str) -> _Resident:
        if self._resident is None or self._resident.spec.name != name:
            raise AdapterError(f"adapter {name!r} is not resident in this engine")
        return self._resident


def _check_targets(model: ShardedModel, spec: AdapterSpec) -> None:
    sites = model.every_site(spec)
    for target in spec.target_modules:
        if not any(key.covered([target]) for key in sites):
            known = ", ".join(dict.fromkeys(f"{key.scope}.{key.linear}" for key in sites))
            raise ConfigError(
                "adapters.target_modules", f"{target!r} matches no layer of this model", f"it has {known}"
            )


def _state_of(memory: AdapterMemory) -> dict[str, Tensor]:
    """The memory of each of `PARTS`."""
    flats = {"weight": memory.weights, **memory.moments}
    return {part: flats[part] for part in PARTS}

"""The verbs of `TrainEngine` that do not depend on what computes the model: everything about adapters' numbers.

An engine is an `AdapterEngine` with a `Compute`. Adapters are held by name, each with memory, optimizer and clock of
its own (contract C1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.algorithms.merging import CastLoss
from areal_lora.checkpoint.state import PARTS, AdapterState
from areal_lora.config.models import ModelConfig, OptimizerConfig
from areal_lora.engine.base import AdamValues, LossFn
from areal_lora.engine.common.adapter_memory import (
    AdapterMemory,
    AdapterOptimizer,
    GradientClass,
    checked,
    initial_tensor,
)
from areal_lora.engine.common.arena import Range, ShardedModel
from areal_lora.engine.common.micro_batches import Readout, read_logprobs, read_values
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.common.transfer_plan import MergedShard, merged_layout, wire_sources
from areal_lora.engine.layers.expert_mlp import Dropout, step_seed
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families.targets import check_patterns
from areal_lora.types import AdapterSpec, StepStats, TrainBatch
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.manifest import base_digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Compute(Protocol):
    """The frozen base on this rank with the adapters attached to it. Every call but `detach` is collective."""

    rank: int
    world_size: int

    @property
    def groups(self) -> Mapping[Range, dist.ProcessGroup]:
        """The tensor-parallel groups of the split ranges."""
        ...

    def attach(self, memory: AdapterMemory) -> Sequence[GradientClass]:
        """Add the adapter in ``memory`` to the model's layers; its gradients accumulate in ``memory``.

        Returns which ranks share them.
        """
        ...

    def detach(self, name: str) -> None:
        """Forget an attached adapter (not collective)."""
        ...

    def score(self, batch: TrainBatch, adapter: str | None, readout: Readout) -> Tensor:
        """What ``readout`` reads of each token, [T] fp32, no grad, for the whole batch on every rank."""
        ...

    def forward_backward(
        self,
        batch: TrainBatch,
        adapter: str,
        loss_fn: LossFn,
        readout: Readout,
        *,
        need_entropy: bool,
        dropout: Dropout | None,
        scores: Tensor | None,
    ) -> dict[str, float]:
        """See `TrainEngine.forward_backward`; ``dropout`` are the masks of the adapter's inputs."""
        ...


@dataclass(slots=True, kw_only=True)
class Resident:
    """An adapter that is attached to the model; a frozen one has no ``optimizer``."""

    spec: AdapterSpec
    memory: AdapterMemory
    optimizer: AdapterOptimizer | None
    seed: int

    def trained(self) -> AdapterOptimizer:
        """Raises AdapterError for a frozen adapter."""
        if self.optimizer is None:
            raise AdapterError(f"adapter {self.spec.name!r} is frozen")
        return self.optimizer

    def dropout(self) -> Dropout | None:
        """The masks of the next optimizer step's passes; scores have none (contract C10)."""
        if not self.spec.dropout:
            return None
        return Dropout(rate=self.spec.dropout, seed=step_seed(self.seed, self.trained().step_count))


class AdapterEngine:
    """`TrainEngine` on a `Compute`."""

    def __init__(self, model: Compute, sharded: ShardedModel, base: ModelConfig, device: torch.device) -> None:
        self.rank, self.world_size = model.rank, model.world_size
        self.routed = sharded.shape.experts > 0
        self._model, self._sharded, self._base = model, sharded, base
        self._merged: dict[str, MergedShard] = {}
        self._device = device
        self._residents: dict[str, Resident] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def add_adapter(self, spec: AdapterSpec, optimizer: OptimizerConfig, seed: int) -> None:
        if spec.name in self._residents:
            raise ConfigError("adapters", f"{spec.name!r} is resident already", "give each adapter its own name")
        _check_targets(self._sharded, spec)
        check_patterns(self._sharded.shape, spec)
        memory = AdapterMemory(self._sharded, spec, self.rank, self._device)
        adam = AdapterOptimizer(optimizer, memory, self._model.attach(memory))
        held_names = set(memory.held_names())
        shards = memory.layout("float32").shards
        first = {t.name: initial_tensor(t, seed) for shard in shards for t in shard.tensors if t.name in held_names}
        memory.load(memory.weights, first)
        self._residents[spec.name] = Resident(spec=spec, memory=memory, optimizer=adam, seed=seed)

    def freeze_copy(self, adapter: str, name: str) -> None:
        source = self._adapter(adapter)
        if name not in self._residents:
            spec = replace(source.spec, name=name)
            memory = AdapterMemory(self._sharded, spec, self.rank, self._device, frozen=True)
            self._model.attach(memory)
            self._residents[name] = Resident(spec=spec, memory=memory, optimizer=None, seed=source.seed)
        copy = self._adapter(name)
        if copy.optimizer is not None:
            raise AdapterError(f"adapter {name!r} is trained: no copy may replace it")
        copy.memory.weights.copy_(source.memory.weights)

    def remove_adapter(self, adapter: str) -> None:
        self._adapter(adapter)
        self._model.detach(adapter)
        del self._residents[adapter]
        self._merged.pop(adapter, None)

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> Tensor:
        if adapter is not None and self._adapter(adapter).spec.value_head:
            raise AdapterError(f"adapter {adapter!r} gives values, not log-probabilities")
        return self._model.score(batch, adapter, read_logprobs(temperature))

    def values(self, batch: TrainBatch, *, adapter: str) -> Tensor:
        if not self._adapter(adapter).spec.value_head:
            raise AdapterError(f"adapter {adapter!r} has no value head")
        return self._model.score(batch, adapter, read_values)

    def forward_backward(
        self,
        batch: TrainBatch,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        need_entropy: bool = False,
        scores: Tensor | None = None,
    ) -> dict[str, float]:
        names = set(batch.adapters)
        if len(names) != 1:
            raise AdapterError(f"a batch names the adapters {sorted(names)}; each batch trains one")
        (adapter,) = names
        resident = self._adapter(adapter)
        resident.trained()
        readout = read_values if resident.spec.value_head else read_logprobs(temperature)
        return self._model.forward_backward(
            batch, adapter, loss_fn, readout, need_entropy=need_entropy, dropout=resident.dropout(), scores=scores
        )

    def optim_step(self, adapter: str, denominator: float, lr: float, adam: AdamValues | None = None) -> StepStats:
        return self._adapter(adapter).trained().step(denominator, lr, adam)

    def discard_gradients(self, adapter: str) -> None:
        self._adapter(adapter).memory.grads.zero_()

    def step_count(self, adapter: str) -> int:
        return self._adapter(adapter).trained().step_count

    def adapter_spec(self, adapter: str) -> AdapterSpec:
        return self._adapter(adapter).spec

    def adapter_sources(self) -> frozenset[int]:
        return wire_sources(self._sharded)

    def adapter_layout(self, adapter: str, dtype: str = "float32") -> AdapterLayout:
        return self._adapter(adapter).memory.layout(dtype)

    def pack_adapter(self, adapter: str, dtype: str, flat: np.ndarray) -> Iterator[int]:
        return self._adapter(adapter).memory.fill_shard(dtype, flat, self._model.groups)

    def merged_layout(self, adapter: str, dtype: str) -> AdapterLayout:
        return merged_layout(self.adapter_layout(adapter), dtype)

    def pack_merged(self, adapter: str, loss: CastLoss, flat: np.ndarray) -> Iterator[int]:
        if adapter not in self._merged:
            folder, held = ModelFolder.of(self._base), DTYPES[self._base.dtype]
            self._merged[adapter] = MergedShard(folder, self.adapter_layout(adapter), self.rank, held)
        # All of the adapter before the first weight: what is sent must not depend on when the iterator runs.
        tensors = dict(self.export_adapter(adapter)) | self._adapter(adapter).memory.shared_tensors()
        return self._merged[adapter].fill(tensors, flat, loss)

    def export_adapter(self, adapter: str) -> Iterator[tuple[str, Tensor]]:
        memory = self._adapter(adapter).memory
        return memory.tensors(memory.weights, self._model.groups)

    def load_adapter(self, adapter: str, tensors: Mapping[str, Tensor]) -> None:
        memory = self._adapter(adapter).memory
        memory.load(memory.weights, checked(memory.layout("float32"), tensors))

    def base_digest(self) -> str:
        return base_digest(self._base.folder)

    def export_state(self, adapter: str) -> AdapterState:
        resident = self._adapter(adapter)
        memory = resident.memory
        shard = memory.shard("float32")
        return AdapterState(
            step=resident.optimizer.step_count if resident.optimizer else 0,
            shapes={t.name: t.shape for t in (shard.tensors if shard else ())},
            parts={part: memory.export(flat, self._model.groups) for part, flat in _state_of(memory).items()},
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
        if resident.optimizer:
            resident.optimizer.set_clock(step)

    def _adapter(self, name: str) -> Resident:
        if name not in self._residents:
            raise AdapterError(f"adapter {name!r} is not resident in this engine")
        return self._residents[name]


def _check_targets(model: ShardedModel, spec: AdapterSpec) -> None:
    sites = model.every_site(spec)
    for target in spec.target_modules:
        if not any(key.covered([target]) for key in sites):
            known = ", ".join(dict.fromkeys(f"{key.scope}.{key.linear}" for key in sites))
            raise ConfigError(
                "adapters.target_modules", f"{target!r} matches no layer of this model", f"it has {known}"
            )


def _state_of(memory: AdapterMemory) -> dict[str, Tensor]:
    """The memory of each of `PARTS`; a frozen adapter has its weights only."""
    flats = {"weight": memory.weights, **memory.moments}
    return {part: flats[part] for part in PARTS if part in flats}

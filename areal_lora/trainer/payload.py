"""What a version is on the wire: the adapter, or the weights that it changes. `rollout.adapter_mode` chooses one.

Both travel in the wire type of the adapter's `AdapterRun`, which is that of the servers where weights are merged.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from areal_lora.algorithms.merging import CastLoss
from areal_lora.config.models import Config
from areal_lora.engine.base import TrainEngine
from areal_lora.engine.common.adapter_engine import DTYPES
from areal_lora.engine.common.merged import MEASURED_ROWS
from areal_lora.trainer.adapter import Adapter
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.trainer.packed_shard import Pack


class OutgoingPayload(Protocol):
    """``cast`` counts what packing the version in progress loses by a cast; None: nothing is cast."""

    cast: CastLoss | None

    def layout(self, adapter: Adapter) -> AdapterLayout:
        """The layout of every version of the adapter."""
        ...

    def pack(self, adapter: Adapter) -> Pack:
        """Begin the next version: ``cast`` is a new one. Collective."""
        ...


class UnmergedPayload:
    """lora_A and lora_B."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self.cast: CastLoss | None = None

    def layout(self, adapter: Adapter) -> AdapterLayout:
        return self._engine.adapter_layout(adapter.name, adapter.run.wire_dtype)

    def pack(self, adapter: Adapter) -> Pack:
        return partial(self._engine.pack_adapter, adapter.name, adapter.run.wire_dtype)


class MergedPayload:
    """The adapted weights."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self.cast: CastLoss | None = None

    def layout(self, adapter: Adapter) -> AdapterLayout:
        return self._engine.merged_layout(adapter.name, adapter.run.wire_dtype)

    def pack(self, adapter: Adapter) -> Pack:
        self.cast = CastLoss(dtype=DTYPES[adapter.run.wire_dtype], rows=MEASURED_ROWS)
        return partial(self._engine.pack_merged, adapter.name, self.cast)


def outgoing_payload(config: Config, engine: TrainEngine) -> OutgoingPayload:
    if config.rollout.adapter_mode == "merged":
        return MergedPayload(engine)
    return UnmergedPayload(engine)

"""Merged weights of an adapter: the layout of a version that travels as weights, and a rank's share of it.

    base folder --read--> W [out, in], as the model holds it --+
    this rank's memory --> lora_A, lora_B (fp32, copied first) --+--> W + alpha / rank * lora_B @ lora_A --> the shard

The base comes from the folder that every rank has loaded it from. So nothing here touches the model that trains, the
sum is the same for every parallel layout and engine, and each version is computed from the base, never from the version
before. A weight is sent by the rank that sends the module's lora_B, or its lora_A where experts share one lora_B: the
rank that has the expert. What experts share is in the memory of every such rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_lora.algorithms.merging import CastLoss, merged
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.weight_sync.layout import AdapterLayout, Payload, Shape, ShardLayout, make_layout
from areal_lora.weight_sync.served import LORA_A, LORA_B, WEIGHT

MEASURED_ROWS = 64
"""Rows of a weight that `CastLoss` looks at: a publish of 60 GB must not wait for the statistics of each element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A weight that a rank sends, and the wire tensors that change it."""

    name: str
    lora_a: str
    lora_b: str


def merged_layout(adapter: AdapterLayout, dtype: str) -> AdapterLayout:
    """The layout of the weights that an adapter with the layout ``adapter`` changes, in ``dtype``."""
    shapes = {t.name: t.shape for shard in adapter.shards for t in shard.tensors}
    owned: dict[int, list[tuple[str, Shape]]] = {
        shard.source: [(s.name, (shapes[s.lora_b][0], shapes[s.lora_a][1])) for s in _sources(adapter, shard)]
        for shard in adapter.shards
    }
    return make_layout(adapter.structure, dtype, owned, {}, Payload.MERGED)


def _sources(adapter: AdapterLayout, shard: ShardLayout) -> Iterator[_Source]:
    """The weights of a shard, in the order of the tensors with which they travel."""
    aliases = adapter.aliases
    sharing: dict[str, list[str]] = {}  # modules without a lora_B of their own, by the tensor with which they travel
    for name, wire in aliases.items():
        if name.endswith(LORA_B):
            module = name.removesuffix(LORA_B)
            lora_a = module + LORA_A
            sharing.setdefault(wire if lora_a in aliases else lora_a, []).append(module)
    for tensor in shard.tensors:
        own = [tensor.name.removesuffix(LORA_B)] if tensor.name.endswith(LORA_B) else []
        for module in (*own, *sharing.get(tensor.name, ())):
            a, b = (aliases.get(name, name) for name in (module + LORA_A, module + LORA_B))
            yield _Source(name=module + WEIGHT, lora_a=a, lora_b=b)


class MergedShard:
    """One rank's share of the merged weights. ``held`` is the type in which the model holds the base."""

    def __init__(self, base: ModelFolder, adapter: AdapterLayout, rank: int, held: torch.dtype) -> None:
        mine = next((shard for shard in adapter.shards if shard.source == rank), None)
        self._base, self._held, self._scale_of = base, held, adapter.structure.scale_of
        self._sources: Sequence[_Source] = list(_sources(adapter, mine)) if mine else []

    def fill(self, tensors: Mapping[str, Tensor], flat: np.ndarray, loss: CastLoss) -> Iterator[int]:
        """Fill ``flat`` (uint8, a shard of `merged_layout` in ``loss.dtype``) weight by weight; see `Pack`.

        ``tensors`` are this rank's wire tensors in fp32, and what its experts share. ``loss`` counts what the cast
        loses. Raises UnknownTensorError if the base folder does not fit.
        """
        adapter = {s.name.removesuffix(WEIGHT) + LORA_A: tensors[s.lora_a] for s in self._sources}
        adapter |= {s.name.removesuffix(WEIGHT) + LORA_B: tensors[s.lora_b] for s in self._sources}
        weights = ((s.name, self._base.whole(s.name).to(self._held)) for s in self._sources)
        end = 0
        for done, (_, weight) in enumerate(merged(weights, adapter, self._scale_of, dtype=loss.dtype, loss=loss), 1):
            start, end = end, end + weight.numel() * weight.element_size()
            flat[start:end] = weight.contiguous().view(-1).view(torch.uint8).numpy()
            yield done

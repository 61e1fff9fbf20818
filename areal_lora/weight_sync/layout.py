"""Layout of a version on the wire: computed once, equal on all ranks, named by its digest.

A version travels as its adapter or as the weights that the adapter changes (`Payload`). A weight has the name of the
base's tensor, ``model.layers.3.mlp.experts.7.gate_proj.weight``, and its shape ``[out, in]``. A matrix of an adapter is
named by the module path without prefix: ``model.layers.3.mlp.experts.7.gate_proj.lora_A.weight`` with shape
``[rank, in]``, and ``...lora_B.weight`` with shape ``[out, rank]``. ``alpha / rank`` is not folded in. A tensor that
serves several names is sent once (contract C5); ``aliases`` maps the others to it. A publish only names its layout, so
its cost does not grow with names.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import msgspec
import numpy as np

from areal_lora.config.sizing.slots import bucket_ends
from areal_lora.errors import ManifestError, RefusalReason
from areal_lora.types import AdapterStructure
from areal_lora.weight_sync.kernels import ITEM_BYTES, Marks, multipliers

Shape = tuple[int, ...]


class Payload(StrEnum):
    """What a version is on the wire; the values are those of ``rollout.adapter_mode``."""

    UNMERGED = "unmerged"  # lora_A and lora_B
    MERGED = "merged"  # base + alpha / rank * lora_B @ lora_A, of every weight that the adapter changes


class WireTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a shard; ``offset`` in bytes from the shard's start."""

    name: str
    shape: Shape
    offset: int


class ShardLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The flat buffer of one source rank: tensors back to back in this order, ``nbytes`` long."""

    source: int
    tensors: tuple[WireTensor, ...]
    nbytes: int


class AdapterLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All properties of an adapter on the wire that do not change from version to version, except its name.

    Adapters of one structure share a layout: the names of adapters are in manifests only.
    """

    structure: AdapterStructure
    dtype: str  # among kernels.KINDS
    shards: tuple[ShardLayout, ...]
    aliases: dict[str, str]
    payload: Payload = Payload.UNMERGED

    @cached_property
    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of the encoded layout; manifests name a layout by it."""
        return hashlib.blake2b(self.encoded, digest_size=16).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards: the unique bytes of a version."""
        return sum(s.nbytes for s in self.shards)

    @cached_property
    def tables(self) -> "tuple[TensorTable, ...]":
        """By shard, computed once per layout: the cost of a version must not grow with names."""
        return tuple(TensorTable(shard, self.dtype) for shard in self.shards)

    @cached_property
    def _full_names(self) -> list[str]:
        return sorted([*(t.name for s in self.shards for t in s.tensors), *self.aliases])

    @cached_property
    def names_digest(self) -> str:
        """BLAKE2b-128 of all full names in order."""
        return hashlib.blake2b("\n".join(self._full_names).encode(), digest_size=16).hexdigest()

    @cached_property
    def weights(self) -> tuple[np.ndarray, ...]:
        """Multipliers of `manifest.shard_sum` per shard, uint64 [tensors, 2]: for each tensor the sum of the keys that
        belong to the places of its names in sorted order.

        The sum depends neither on the sharding of the trainer nor on which names share a tensor on the wire.
        """
        index = {t.name: i for i, t in enumerate(t for s in self.shards for t in s.tensors)}
        owner = [index[self.aliases.get(name, name)] for name in self._full_names]
        flat = np.zeros((len(index), 2), dtype=np.uint64)
        np.add.at(flat, owner, multipliers("place", 2 * len(owner)).reshape(-1, 2))
        ends = np.cumsum([len(s.tensors) for s in self.shards])
        return tuple(np.split(flat, ends[:-1])) if self.shards else ()


def make_layout(
    structure: AdapterStructure,
    dtype: str,
    owned: Mapping[int, Sequence[tuple[str, Shape]]],
    aliases: Mapping[str, str],
    payload: Payload = Payload.UNMERGED,
) -> AdapterLayout:
    """Lay out the tensors that each source rank owns, in the given order.

    Raises ManifestError (``dtype``, ``duplicate``, ``unknown_tensor``).
    """
    if dtype not in ITEM_BYTES:
        raise ManifestError(RefusalReason.DTYPE, f"wire dtype {dtype!r} is not one of {sorted(ITEM_BYTES)}")
    seen: set[str] = set()
    shards = []
    for source, tensors in sorted(owned.items()):
        places, offset = [], 0
        for name, shape in tensors:
            if name in seen or name in aliases:
                text = f"{name} is declared twice (again by source rank {source})"
                raise ManifestError(RefusalReason.DUPLICATE, text)
            seen.add(name)
            places.append(WireTensor(name, tuple(shape), offset))
            offset += math.prod(shape) * ITEM_BYTES[dtype]
        shards.append(ShardLayout(source=source, tensors=tuple(places), nbytes=offset))
    for name, target in aliases.items():
        if target not in seen:
            raise ManifestError(RefusalReason.UNKNOWN_TENSOR, f"alias {name} -> {target}: no rank owns {target}")
    return AdapterLayout(
        structure=structure.bare(), dtype=dtype, shards=tuple(shards), aliases=dict(aliases), payload=payload
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One broadcast: tensors ``[first, last)`` of a shard, its bytes ``[start, end)``."""

    first: int
    last: int
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def plan_buckets(shard: ShardLayout, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut a shard between tensors into buckets of at most ``bucket_bytes`` (one tensor may be larger).

    Packing and writing are about twice as fast as the wire. So buckets start small and double, and
    halve again at the end: the wire never waits for packing, and little remains to be written after it.
    """
    ends = [*(t.offset for t in shard.tensors[1:]), shard.nbytes] if shard.tensors else []
    buckets: list[Bucket] = []
    first, start = 0, 0
    goals = iter(bucket_ends(shard.nbytes, bucket_bytes))
    goal = next(goals, 0)
    for i, end in enumerate(ends):
        full = i + 1 == len(ends) or ends[i + 1] - start > bucket_bytes
        if full or end >= goal:
            buckets.append(Bucket(first=first, last=i + 1, start=start, end=end))
            first, start = i + 1, end
            while goal <= end and i + 1 < len(ends):
                goal = next(goals, shard.nbytes)
    return tuple(buckets)


class TensorTable:
    """Offsets and ends (bytes) and sizes (elements) of a shard's tensors, int64 [n], for the compiled loops."""

    def __init__(self, shard: ShardLayout, dtype: str) -> None:
        self._shard, self.dtype = shard, dtype
        self.offsets = np.array([t.offset for t in shard.tensors], dtype=np.int64)
        self.ends = np.array([*self.offsets[1:], shard.nbytes] if shard.tensors else [], dtype=np.int64)
        self.sizes = (self.ends - self.offsets) // ITEM_BYTES[dtype]
        self._buckets: dict[int, tuple[Bucket, ...]] = {}

    def end(self, tensors: int) -> int:
        """End of the first ``tensors`` of the shard, bytes."""
        return 0 if tensors == 0 else int(self.ends[tensors - 1])

    def buckets(self, bucket_bytes: int) -> tuple[Bucket, ...]:
        if bucket_bytes not in self._buckets:
            self._buckets[bucket_bytes] = plan_buckets(self._shard, bucket_bytes)
        return self._buckets[bucket_bytes]

    def marks(self, keys: np.ndarray) -> Marks:
        """Empty marks for one version, whose fingerprints have the multipliers ``keys``."""
        n = len(self.offsets)
        return Marks(
            dtype=self.dtype,
            keys=keys,
            offsets=self.offsets,
            sizes=self.sizes,
            sums=np.zeros(n, dtype=np.uint64),
            bad=np.zeros(n, dtype=np.uint8),
        )

"""Tables of a layout for the compiled loops: offsets and sizes of a shard's tensors."""

from __future__ import annotations

import numpy as np

from areal_lora.weight_sync.blocks import ITEM_BYTES, Marks
from areal_lora.weight_sync.layout import AdapterLayout, Bucket, ShardLayout, plan_buckets


class TensorTable:
    """Offsets and ends (bytes) and sizes (elements) of a shard's tensors, int64 [n], for the compiled loops."""

    def __init__(self, shard: ShardLayout, dtype: str) -> None:
        item = ITEM_BYTES[dtype]
        self._dtype = dtype
        self.offsets = np.array([t.offset for t in shard.tensors], dtype=np.int64)
        ends = [*(t.offset for t in shard.tensors[1:]), shard.nbytes] if shard.tensors else []
        self.ends = np.array(ends, dtype=np.int64)
        self.sizes = (self.ends - self.offsets) // item

    def end(self, tensors: int) -> int:
        """End of the first ``tensors`` of the shard, bytes."""
        return 0 if tensors == 0 else int(self.ends[tensors - 1])

    def marks(self, sums: np.ndarray | None = None) -> Marks:
        """Empty marks for one version; fingerprints are written to ``sums`` (uint64 [n]) if given."""
        n = len(self.offsets)
        return Marks(
            dtype=self._dtype,
            offsets=self.offsets,
            sizes=self.sizes,
            sums=np.zeros(n, dtype=np.uint64) if sums is None else sums,
            bad=np.zeros(n, dtype=np.uint8),
        )


class LayoutTables:
    """Tables of all shards, computed once per layout: the cost of a version must not grow with names."""

    def __init__(self, layout: AdapterLayout) -> None:
        self.layout = layout
        self.shards = tuple(TensorTable(shard, layout.dtype) for shard in layout.shards)
        self._buckets: dict[tuple[int, int], tuple[Bucket, ...]] = {}

    def buckets(self, shard: int, bucket_bytes: int) -> tuple[Bucket, ...]:
        """``plan_buckets`` of a shard by its index."""
        key = shard, bucket_bytes
        if key not in self._buckets:
            self._buckets[key] = plan_buckets(self.layout.shards[shard], bucket_bytes)
        return self._buckets[key]

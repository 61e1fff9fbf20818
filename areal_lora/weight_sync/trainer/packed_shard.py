"""Pack one rank's shard of a version and send it, bucket by bucket.

    main thread        pack bucket 0 | pack bucket 1 | ...          (the caller's ``Pack``)
                            | fingerprints   | fingerprints
    publisher thread        `-> broadcast 0  `-> broadcast 1 ... -> broadcast trailer

The trailer follows the tensors and holds their fingerprints, so hashing does not delay the first bucket.
A packed shard stays valid until the next ``pack``: it can be sent again to other receivers.
Receivers on the same machine read it in place, following ``pack``; only two signals are sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from areal_lora.errors import PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import AdapterLayout, Bucket, ShardLayout, TensorTable, plan_buckets
from areal_lora.weight_sync.link.broadcast_groups import CPU, BroadcastGroup
from areal_lora.weight_sync.link.same_host import SharedSegment
from areal_lora.weight_sync.manifest import SEAL_BYTES, seal, shard_sum, trailer_part

Pack = Callable[[np.ndarray], Iterator[int]]
"""``pack(flat)`` writes a rank's shard into ``flat`` (uint8 [shard.nbytes], host, in the wire dtype) and
yields the number of complete leading tensors of the shard; the last value is the number of all tensors.
It may be collective over the rank's parallel groups. A rank that owns no tensors gets an empty ``flat``."""


class PackedShard:
    """This rank's part of one version. One thread calls ``pack`` while another calls ``send``."""

    def __init__(self, layout: AdapterLayout, source: int, device: torch.device = CPU) -> None:
        mine = [i for i, s in enumerate(layout.shards) if s.source == source]
        self.layout = layout
        self._index = mine[0] if mine else None
        self.shard = layout.shards[mine[0]] if mine else ShardLayout(source=source, tensors=(), nbytes=0)
        self.is_source = bool(mine)
        self._plans: dict[int, tuple[Bucket, ...]] = {}  # by the group's bucket_bytes
        self._table = TensorTable(self.shard, layout.dtype)
        start, self._end = trailer_part(self.shard)
        self._segment = SharedSegment(self._end, device)
        self._flat, self._trailer = self._segment.bytes[: self.shard.nbytes], self._segment.bytes[start:]
        self._changed = threading.Condition()
        self._done, self._sealed, self._failed = 0, False, False

    @property
    def sums(self) -> np.ndarray:
        """Fingerprints uint64 [n] of the packed tensors."""
        return self._trailer[: 8 * len(self.shard.tensors)].view(np.uint64)

    @property
    def sum(self) -> int:
        """``shard_sum`` of the packed tensors; 0 for a rank that owns no tensors."""
        return 0 if self._index is None else shard_sum(self.layout, self._index, self.sums)

    def reset(self) -> None:
        """Call before ``pack`` and ``send`` of a version; no earlier ``send`` may be in progress.

        Late receivers on this machine, which still read the previous version, notice the new generation.
        """
        self._segment.renew()
        self._done, self._sealed, self._failed = 0, False, False

    def pack(self, ref: AdapterRef, pack: Pack) -> None:
        """Fill the shard while ``send`` follows. Errors of ``pack`` reach the callers of both."""
        marks = self._table.marks(self.sums)
        try:
            for done in pack(self._flat):
                marks.measure(self._flat.ctypes.data, self._done, done)
                self._advance(done)
            if self._done != len(self.shard.tensors):
                raise PublishError(f"{ref}: packed {self._done} of {len(self.shard.tensors)} tensors of this rank")
            self._trailer[-SEAL_BYTES:] = np.frombuffer(seal(ref, self.layout.digest, self.sum), dtype=np.uint8)
            self._advance(self._done, sealed=True)
        except BaseException:  # also an interrupt: the sending thread must not wait for tensors that are never packed
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise

    def send(self, group: BroadcastGroup, deadline: float) -> None:
        """Send buckets as they are packed, then the trailer; the group is free when this returns.

        Receivers on this machine may continue to read: do not pack before they have answered or are excluded.

        Raises PublishError at ``deadline`` (time.monotonic), for a dead peer or a failed ``pack``.
        """
        transfers = []
        if group.same_host:
            transfers.append(group.signal(self._segment, deadline))
        else:
            if group.bucket_bytes not in self._plans:
                self._plans[group.bucket_bytes] = plan_buckets(self.shard, group.bucket_bytes)
            for bucket in self._plans[group.bucket_bytes]:
                self._wait(bucket.last, False, deadline)
                transfers.append(group.start(torch.from_numpy(self._flat[bucket.start : bucket.end]), deadline))
        self._wait(len(self.shard.tensors), True, deadline)
        if group.same_host:
            transfers.append(group.signal(self._segment, deadline))
        else:
            transfers.append(group.start(torch.from_numpy(self._trailer), deadline))
        for transfer in transfers:
            transfer.wait()

    def _advance(self, done: int, sealed: bool = False) -> None:
        self._segment.advance(self._end if sealed else self._table.end(done))
        with self._changed:
            self._done, self._sealed = done, sealed
            self._changed.notify_all()

    def _wait(self, tensors: int, sealed: bool, deadline: float) -> None:
        with self._changed:
            ready = self._changed.wait_for(
                lambda: self._failed or (self._done >= tensors and self._sealed >= sealed),
                timeout=max(deadline - time.monotonic(), 0.0),
            )
        if self._failed or not ready:
            raise PublishError(
                f"shard of trainer rank {self.shard.source}: packing "
                + ("failed; see this rank's error" if self._failed else "did not finish before the deadline")
            )

"""Taking one version off the wire: buckets of all sources through small rings of staging buffers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from areal_lora.errors import ManifestError
from areal_lora.obs.faults import reached
from areal_lora.platforms.device import host_buffer
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.blocks import Marks
from areal_lora.weight_sync.groups import BroadcastGroup, Transfer
from areal_lora.weight_sync.layout import Bucket
from areal_lora.weight_sync.refusal import Refusal
from areal_lora.weight_sync.transport import StageResult
from areal_lora.weight_sync.wire import (
    SEAL_BYTES,
    LayoutTables,
    adapter_digest,
    seal,
    shard_sum,
    trailer_bytes,
)

RING = 3  # buckets of one source in flight: one being read, the others on the wire

OnBucket = Callable[[int, int, int, int, Marks], None]
"""``(shard index, address where the shard would begin, first tensor, last tensor + 1, marks)``: a bucket has
arrived; its tensors must be measured into ``marks``."""


class Clock:
    """Seconds per phase of one staging."""

    def __init__(self) -> None:
        self._spent = {"wire": 0.0, "verify": 0.0, "write": 0.0}
        self._name, self._since = "", 0.0

    def phase(self, name: str) -> Clock:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._spent[self._name] += time.perf_counter() - self._since

    def result(
        self, ref: AdapterRef, slot: int | None, *, digest: str = "", reason: str = "", detail: str = ""
    ) -> StageResult:
        return StageResult(
            ref=str(ref), slot=-1 if slot is None else slot, ok=not reason, reason=reason, detail=detail, digest=digest,
            wire_s=self._spent["wire"], verify_s=self._spent["verify"], write_s=self._spent["write"],
        )


class Ring:
    """Staging memory for one source, grown when needed, then reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[np.ndarray] = [np.empty(0, dtype=np.uint8)] * RING
        self._trailer = self._buffers[0]

    def sized(self, nbytes: int) -> list[np.ndarray]:
        """``RING`` buffers of at least ``nbytes``; earlier views become invalid."""
        if self._buffers[0].size < nbytes:
            self._buffers = [host_buffer(nbytes, self._device) for _ in range(RING)]
        return self._buffers

    def trailer(self, nbytes: int) -> np.ndarray:
        """For the last broadcast of the source; earlier ones become invalid."""
        if self._trailer.size < nbytes:
            self._trailer = host_buffer(nbytes, self._device)
        return self._trailer[:nbytes]


@dataclass(slots=True)
class _Arrival:
    bucket: Bucket | None  # None: the trailer
    buffer: np.ndarray
    transfer: Transfer


class _Source:
    """One shard under way: up to ``RING`` broadcasts posted ahead."""

    def __init__(self, index: int, tables: LayoutTables, group: BroadcastGroup, ring: Ring, deadline: float) -> None:
        self.index, self.shard = index, tables.layout.shards[index]
        self._layout = tables.layout
        self.marks = tables.shards[index].marks()
        self.trailer = ring.trailer(trailer_bytes(self.shard))
        self._group, self._deadline = group, deadline
        buckets = tables.buckets(index, group.bucket_bytes)
        self._free = deque(ring.sized(max((b.nbytes for b in buckets), default=0)))
        self._ahead: deque[Bucket | None] = deque([*buckets, None])
        self._posted: deque[_Arrival] = deque()
        while self._post():
            pass

    def _post(self) -> bool:
        """Post the next broadcast if there is a buffer for it."""
        if not self._ahead or (self._ahead[0] is not None and not self._free):
            return False
        bucket = self._ahead.popleft()
        buffer = self.trailer if bucket is None else self._free.popleft()
        flat = torch.from_numpy(buffer if bucket is None else buffer[: bucket.nbytes])
        self._posted.append(_Arrival(bucket, buffer, self._group.start(flat, self._deadline)))
        return True

    def arrivals(self, clock: Clock) -> Iterator[tuple[Bucket, int]]:
        """(bucket, address where the shard would begin), in order; a buffer is reused after its turn."""
        while self._posted:
            arrival = self._posted.popleft()
            with clock.phase("wire"):
                arrival.transfer.wait()
            if arrival.bucket is not None:
                yield arrival.bucket, arrival.buffer.ctypes.data - arrival.bucket.begin
                self._free.append(arrival.buffer)
            self._post()

    def verify(self, ref: AdapterRef) -> int:
        """The shard's sum if what arrived is what was sent, finite, and meant for this version, else ManifestError."""
        n = len(self.shard.tensors)
        sent, sealed = self.trailer[: 8 * n].view(np.uint64), self.trailer[-SEAL_BYTES:].tobytes()
        total = shard_sum(self._layout, self.index, sent)
        if sealed != seal(ref, self._layout.digest, total):
            raise ManifestError(
                Refusal.HASH, f"the trailer of source rank {self.shard.source} does not belong to {ref} or is damaged"
            )
        changed = np.flatnonzero(sent != self.marks.sums)
        if len(changed):
            name = self.shard.tensors[changed[0]].name
            raise ManifestError(
                Refusal.HASH, f"{len(changed)} tensors of source rank {self.shard.source} arrived changed, first {name}"
            )
        bad = np.flatnonzero(self.marks.bad)
        if len(bad):
            name = self.shard.tensors[bad[0]].name
            raise ManifestError(
                Refusal.NON_FINITE, f"{name} from source rank {self.shard.source} holds NaN or infinity"
            )
        return total


class Reception:
    """All shards of one version. Receives are posted at once: the sources may already be sending."""

    def __init__(
        self, tables: LayoutTables, groups: Mapping[int, BroadcastGroup], rings: Mapping[int, Ring], deadline: float,
        clock: Clock,
    ) -> None:
        self._layout, self._clock = tables.layout, clock
        self._sources = [
            _Source(i, tables, groups[s.source], rings[s.source], deadline)
            for i, s in enumerate(tables.layout.shards)
            if s.source in groups
        ]
        self._stream = self._arrivals()

    def receive(self, ref: AdapterRef, on_bucket: OnBucket) -> str:
        """Every bucket once, sources in turn, then the verdict: the digest of the adapter.

        Raises ManifestError (``hash``, ``non_finite``) after all bytes were taken off the wire,
        PublishError if the transfer breaks.
        """
        for source, bucket, base in self._stream:
            try:
                if source is self._sources[0] and bucket.first == 0:
                    reached("server.receiving")
                with self._clock.phase("write"):
                    on_bucket(source.index, base, bucket.first, bucket.last, source.marks)
            except Exception:  # fault boundary: other servers may get their bytes through this one
                self.drain()
                raise
        with self._clock.phase("verify"):
            return adapter_digest(self._layout, [source.verify(ref) for source in self._sources])

    def drain(self) -> None:
        """Take everything off the wire and forget it, so that the groups stay in step."""
        for _ in self._stream:
            pass

    def _arrivals(self) -> Iterator[tuple[_Source, Bucket, int]]:
        running = [(s, s.arrivals(self._clock)) for s in self._sources]
        while running:
            for source, arrivals in list(running):
                found = next(arrivals, None)
                if found is None:
                    running.remove((source, arrivals))
                else:
                    yield source, *found

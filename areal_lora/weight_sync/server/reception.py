"""Receive one version from all its sources, bucket by bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from areal_lora.errors import ManifestError, PublishError
from areal_lora.processes.watched import reached
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.kernels import Marks
from areal_lora.weight_sync.layout import AdapterLayout, Bucket
from areal_lora.weight_sync.link.broadcast_groups import BroadcastGroup
from areal_lora.weight_sync.manifest import SEAL_BYTES, adapter_digest, seal, shard_sum, trailer_part
from areal_lora.weight_sync.refusal import RefusalReason

OnTensors = Callable[[int, int, int, int, Marks], None]
"""``(shard index, address where the shard would start, first tensor, last tensor + 1, marks)``: the tensors of a
bucket have arrived; they must be measured into ``marks``."""


class PhaseTimer:
    """Measure the seconds per phase of one staging: ``spent_s``."""

    def __init__(self) -> None:
        self.spent_s = {"wire": 0.0, "verify": 0.0, "write": 0.0}
        self._name, self._since = "", 0.0

    def phase(self, name: str) -> PhaseTimer:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.spent_s[self._name] += time.perf_counter() - self._since


class _Source:
    """One shard being received."""

    def __init__(self, index: int, layout: AdapterLayout, group: BroadcastGroup, deadline: float) -> None:
        self.index, self.shard, self._layout = index, layout.shards[index], layout
        self.marks = layout.tables[index].marks()
        self.trailer = np.empty(0, dtype=np.uint8)
        self._buckets = layout.tables[index].buckets(group.bucket_bytes)
        self._inbox = group.receive([*((b.start, b.end) for b in self._buckets), trailer_part(self.shard)], deadline)

    def arrivals(self, timer: PhaseTimer) -> Iterator[tuple[Bucket, int]]:
        """Yield (bucket, address of the shard's byte 0) in order; the memory is valid until the next iteration."""
        for bucket in self._buckets:
            with timer.phase("wire"):
                part = self._inbox.take()
            yield bucket, part.ctypes.data - bucket.start
        with timer.phase("wire"):
            self.trailer = self._inbox.take().copy()
        self._inbox.finish()  # all bytes were read: from here on only this process's memory is used

    def verify(self, ref: AdapterRef) -> int:
        """Return the shard's sum. Raises ManifestError unless its bytes are unchanged, finite and for ``ref``."""
        n = len(self.shard.tensors)
        sent, sealed = self.trailer[: 8 * n].view(np.uint64), self.trailer[-SEAL_BYTES:].tobytes()
        total = shard_sum(self._layout, self.index, sent)
        if sealed != seal(ref, self._layout.digest, total):
            raise ManifestError(
                RefusalReason.HASH,
                f"the trailer of source rank {self.shard.source} does not belong to {ref} or is damaged",
            )
        changed = np.flatnonzero(sent != self.marks.sums)
        if len(changed):
            name = self.shard.tensors[changed[0]].name
            raise ManifestError(
                RefusalReason.HASH,
                f"{len(changed)} tensors of source rank {self.shard.source} arrived changed, first {name}",
            )
        bad = np.flatnonzero(self.marks.bad)
        if len(bad):
            name = self.shard.tensors[bad[0]].name
            raise ManifestError(
                RefusalReason.NON_FINITE, f"{name} from source rank {self.shard.source} holds NaN or infinity"
            )
        return total


class Reception:
    """Receive all shards of one version. Receives are posted at once: the sources may be sending already."""

    def __init__(
        self, layout: AdapterLayout, groups: Mapping[int, BroadcastGroup], deadline: float, timer: PhaseTimer
    ) -> None:
        self._layout, self._timer, self._deadline = layout, timer, deadline
        self._sources = [
            _Source(i, layout, groups[s.source], deadline) for i, s in enumerate(layout.shards) if s.source in groups
        ]
        self._stream = self._arrivals()

    def receive(self, ref: AdapterRef, on_tensors: OnTensors) -> str:
        """Pass all tensors to ``on_tensors`` once, sources in turn, verify all and return the adapter's digest.

        Raises ManifestError (``hash``, ``non_finite``) after all bytes are drained, PublishError if the
        transfer breaks or its deadline passes.
        """
        for source, bucket, base in self._stream:
            self.check_time(ref)
            try:
                if source is self._sources[0] and bucket.first == 0:
                    reached("server.receiving")
                with self._timer.phase("write"):
                    on_tensors(source.index, base, bucket.first, bucket.last, source.marks)
            except Exception:  # fault boundary: other servers may get their bytes through this one
                self.drain()
                raise
        with self._timer.phase("verify"):
            return adapter_digest(self._layout, [source.verify(ref) for source in self._sources])

    def check_time(self, ref: AdapterRef) -> None:
        """Raise PublishError after the deadline: the sender has abandoned the version."""
        if time.monotonic() >= self._deadline:
            raise PublishError(f"{ref} was not staged in time and is dropped; its sender has abandoned it")

    def drain(self) -> None:
        """Receive all remaining bytes and discard them, so that the groups stay in step."""
        for _ in self._stream:
            pass

    def _arrivals(self) -> Iterator[tuple[_Source, Bucket, int]]:
        running = [(s, s.arrivals(self._timer)) for s in self._sources]
        while running:
            for source, arrivals in list(running):
                found = next(arrivals, None)
                if found is None:
                    running.remove((source, arrivals))
                else:
                    yield source, *found

"""Receive all shards of one version on one worker, verify them, and send them on to the groups below."""

import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from areal_lora.errors import ManifestError, PublishError, RefusalReason, undo_on_error
from areal_lora.obs.trace import Spans
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.kernels import Marks
from areal_lora.weight_sync.layout import AdapterLayout, Bucket
from areal_lora.weight_sync.link.broadcast_groups import Broadcast, BroadcastGroup, close_all, start_leaving
from areal_lora.weight_sync.link.inbox import BucketBytes, Memory
from areal_lora.weight_sync.manifest import SEAL_BYTES, ShardKeys, adapter_digest, masked, seal, shard_sum, trailer_part

log = get_logger(__name__)

OnTensors = Callable[[int, BucketBytes, int, int, Marks], None]
"""``(shard index, bytes of a bucket, first tensor, last tensor + 1, marks)``: measures what arrived into ``marks``."""


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """Groups by source rank: ``above`` this worker receives, to those ``below`` it sends on what arrives."""

    above: dict[int, BroadcastGroup] = field(default_factory=dict)
    below: dict[int, BroadcastGroup] = field(default_factory=dict)

    @property
    def groups(self) -> list[BroadcastGroup]:
        return [*self.above.values(), *self.below.values()]

    def close(self) -> None:
        """Notify the other members now, not at their deadline; the trainer opens new groups."""
        close_all(self.groups)


class _Source:
    """One shard being received."""

    def __init__(
        self, i: int, layout: AdapterLayout, links: GroupLinks, deadline: float, keys: ShardKeys, on_device: bool
    ) -> None:
        self.index, self.shard, self._layout, self._keys = i, layout.shards[i], layout, keys
        self.marks = layout.tables[i].marks(keys.multipliers)
        self.trailer = np.empty(0, dtype=np.uint8)
        group = links.above[self.shard.source]
        self._buckets = layout.tables[i].buckets(group.bucket_bytes)
        parts = [*((b.start, b.end) for b in self._buckets), trailer_part(self.shard)]
        self._inbox = group.receive(parts, deadline, on_device)
        self._below, self._deadline = links.below.get(self.shard.source), deadline
        self._sending: Broadcast | None = None

    def _take(self) -> Memory:
        """The next part, which is sent on while it is used: its memory is free again at the next call."""
        self._await_sent()
        part = self._inbox.take()
        if (below := self._below) is not None:
            with self._sends_on():
                self._sending = below.start(torch.as_tensor(part), self._deadline)
        return part

    def _await_sent(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            with self._sends_on():
                sending.wait()

    @contextmanager
    def _sends_on(self) -> Iterator[None]:
        """A failure leaves the group below, whose members report it; this worker receives on."""
        try:
            yield
        except PublishError as e:
            log.warning("not sent on: %s", e)
            if self._below is not None:
                start_leaving([self._below])  # which may wait for what this thread receives
            self._below = None

    def arrivals(self, spans: Spans) -> Iterator[tuple[Bucket, BucketBytes]]:
        """Yield (bucket, its bytes) in order; the memory is valid until the next iteration."""
        for bucket in self._buckets:
            with spans.span("wire"):
                part = self._take()
            yield bucket, BucketBytes(part, bucket.start)
        with spans.span("wire"):
            part = self._take()
            self._await_sent()
        self.trailer = part.copy() if isinstance(part, np.ndarray) else part.cpu().numpy()
        self._inbox.finish()  # all bytes were read: from here on only this process's memory is used

    def verify(self, ref: AdapterRef) -> int:
        """Return the shard's sum. Raises ManifestError unless its bytes are unchanged, finite and for ``ref``."""
        tensors, rank = self.shard.tensors, f"source rank {self.shard.source}"
        sealed = self.trailer[-SEAL_BYTES:].tobytes()
        sent = masked(self.trailer[:-SEAL_BYTES].view(np.uint64), sealed, self._keys.mask)
        total = shard_sum(self._layout, self.index, sent)
        if not hmac.compare_digest(sealed, seal(ref, self._layout.digest, total, self._keys.seal)):
            raise ManifestError(RefusalReason.HASH, f"the trailer of {rank} does not belong to {ref} or is damaged")
        if len(changed := np.flatnonzero(sent != self.marks.sums)):
            text = f"{len(changed)} tensors of {rank} arrived changed, first {tensors[changed[0]].name}"
            raise ManifestError(RefusalReason.HASH, text)
        if len(bad := np.flatnonzero(self.marks.bad)):
            raise ManifestError(RefusalReason.NON_FINITE, f"{tensors[bad[0]].name} from {rank} holds NaN or infinity")
        return total


class Reception:
    """Receive all shards of one version. Receives are posted at once: the sources may be sending already.

    ``spans`` measure the phases ``wire``, ``verify`` and ``write``.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        links: GroupLinks,
        deadline: float,
        spans: Spans,
        keys: ShardKeys,
        on_device: bool = False,
    ) -> None:
        self._layout, self._spans, self._deadline = layout, spans, deadline
        here = [i for i, s in enumerate(layout.shards) if s.source in links.above]
        self._sources = [_Source(i, layout, links, deadline, keys, on_device) for i in here]
        self._stream = self._arrivals()

    def receive(self, ref: AdapterRef, on_tensors: OnTensors) -> str:
        """Pass all tensors to ``on_tensors`` once, sources in turn, verify all and return the adapter's digest.

        Raises ManifestError (``hash``, ``non_finite``) after all bytes are drained, PublishError for a broken transfer.
        """
        for source, bucket, arrived in self._stream:
            self.check_time(ref)
            with undo_on_error(self.drain):  # other servers may get their bytes through this one
                if source is self._sources[0] and bucket.first == 0:
                    reached("server.receiving")
                with self._spans.span("write"):
                    on_tensors(source.index, arrived, bucket.first, bucket.last, source.marks)
        with self._spans.span("verify"):
            return adapter_digest(self._layout, [source.verify(ref) for source in self._sources])

    def check_time(self, ref: AdapterRef) -> None:
        """Raise PublishError after the deadline: the sender has abandoned the version."""
        if time.monotonic() >= self._deadline:
            raise PublishError(f"{ref} was not staged in time and is dropped; its sender has abandoned it")

    def drain(self) -> None:
        """Receive all remaining bytes and discard them, so that the groups stay in step."""
        for _ in self._stream:
            pass

    def _arrivals(self) -> Iterator[tuple[_Source, Bucket, BucketBytes]]:
        running = [(s, s.arrivals(self._spans)) for s in self._sources]
        while running:
            for source, arrivals in list(running):
                found = next(arrivals, None)
                if found is None:
                    running.remove((source, arrivals))
                else:
                    yield source, *found

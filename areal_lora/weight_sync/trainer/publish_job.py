"""Pack one rank's shard of a version and send it, bucket by bucket.

    main thread        pack bucket 0 | pack bucket 1 | ...          (the caller's ``Pack``)
                            | fingerprints   | fingerprints
    publisher thread        `-> broadcast 0  `-> broadcast 1 ... -> broadcast trailer

The trailer follows the tensors and holds their fingerprints, so hashing does not delay the first bucket.
A packed shard stays valid until the next ``pack``: it can be sent again to other receivers.
Receivers on the same machine read it in place, following ``pack``; only two signals are sent.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from areal_lora.algorithms.merging import CastLoss
from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import PublishError, undo_on_error
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout, Payload, ShardLayout, TensorTable
from areal_lora.weight_sync.link.broadcast_groups import CPU, BroadcastGroup
from areal_lora.weight_sync.link.inbox import RING
from areal_lora.weight_sync.link.same_host import SharedSegment
from areal_lora.weight_sync.manifest import SEAL_BYTES, ShardKeys, masked, seal, shard_sum, trailer_part
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.strided import ChunkSums
from areal_lora.weight_sync.trainer.decisions import Failure, Progress, PublishReport

Pack = Callable[[torch.Tensor], Iterator[int]]
"""``pack(flat)`` writes a rank's shard into ``flat`` (uint8 [shard.nbytes], in the wire dtype; where the adapter is, or
on the host for merged weights) and yields the number of complete leading tensors; the last value is that of all.
It may be collective over the rank's parallel groups, with merged weights only until it returns. A rank that owns no
tensors gets an empty ``flat``."""


class PackedShard:
    """This rank's part of one version. One thread calls ``pack`` while another calls ``send``."""

    def __init__(
        self,
        layout: AdapterLayout,
        source: int,
        keys: ShardKeys,
        device: torch.device = CPU,
        *,
        strided: bool | None = None,
    ) -> None:
        """``strided``: the tensors are device memory, by default those of an adapter on an accelerator."""
        mine = [i for i, s in enumerate(layout.shards) if s.source == source]
        self.layout, self._keys = layout, keys
        self._index = mine[0] if mine else None
        self.shard = layout.shards[mine[0]] if mine else ShardLayout(source=source, tensors=(), nbytes=0)
        self.is_source = bool(mine)
        self._table = TensorTable(self.shard, layout.dtype)
        start, self._end = trailer_part(self.shard)
        if strided is None:
            strided = device.type != "cpu" and layout.payload is Payload.UNMERGED
        apart = start if strided else 0
        self._segment = SharedSegment(self._end - apart, device)
        self._trailer = self._segment.bytes[start - apart :]
        self.flat = torch.from_numpy(self._segment.bytes[: self.shard.nbytes])
        self._chunks: ChunkSums | None = None
        if strided:
            self.flat = torch.empty(self.shard.nbytes, dtype=torch.uint8, device=device)
            self._chunks = ChunkSums(self._table)
        self._changed = threading.Condition()
        self._done, self._sealed, self._failed = 0, False, False
        self.sums = np.zeros(len(self.shard.tensors), dtype=np.uint64)
        """Fingerprints of the packed tensors."""

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
        marks = self._table.marks(self._keys.multipliers)
        self.sums = marks.sums
        with undo_on_error(self.abandon):  # also an interrupt
            for done in pack(self.flat):
                if self._chunks is None:
                    marks.measure(self.flat.data_ptr(), self._done, done)
                else:  # this waits for the packing, too
                    part = self.flat[self._table.end(self._done) : self._table.end(done)]
                    self._chunks.measure(marks, part, self._done, done)
                self._advance(done)
            if self._done != len(self.shard.tensors):
                raise PublishError(f"{ref}: packed {self._done} of {len(self.shard.tensors)} tensors of this rank")
            sealed = seal(ref, self.layout.digest, self.sum, self._keys.seal)
            self._trailer[-SEAL_BYTES:] = np.frombuffer(sealed, dtype=np.uint8)
            self._trailer[:-SEAL_BYTES] = masked(self.sums, sealed, self._keys.mask).view(np.uint8)
            self._advance(self._done, sealed=True)

    def place(self, at: int, part: bytes) -> None:
        """Store a part of a shard that another process has packed, trailer included; call it in order of ``at``."""
        end = at + len(part)
        self._segment.bytes[at:end] = np.frombuffer(part, dtype=np.uint8)
        self._advance(int(np.searchsorted(self._table.ends, end, side="right")), sealed=end >= self._end)

    def abandon(self) -> None:
        """Wake the sending thread: the remaining tensors are never packed."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def send(self, group: BroadcastGroup, deadline: float) -> None:
        """Send buckets as they are packed, then the trailer; the group is free when this returns.

        Receivers on this machine may continue to read: do not pack before they have answered or are excluded.
        Raises PublishError at ``deadline`` (time.monotonic), for a dead peer or a failed ``pack``.
        """
        transfers = []
        try:
            if group.same_host:
                transfers.append(group.signal(self._segment, deadline))
            else:
                for bucket in self._table.buckets(group.bucket_bytes):
                    self._wait(bucket.last, False, deadline)
                    transfers.append(group.start(self.flat[bucket.start : bucket.end], deadline))
                    if group.on_device and len(transfers) == RING:
                        transfers.pop(0).wait()
            self._wait(len(self.shard.tensors), True, deadline)
            if group.same_host:
                transfers.append(group.signal(self._segment, deadline))
            else:
                transfers.append(group.start(torch.from_numpy(self._trailer), deadline))
            for transfer in transfers:
                transfer.wait()
        finally:
            transfers.clear()  # a traceback would keep them, and they the connections of a closed group

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


SLACK_S = 10.0
"""Added to rank 0's remaining time when a rank waits for other ranks: they run on busy machines."""


class Budget:
    """Time of one publish, shared by all ranks: ``timeout_s`` for transfers, then ``verdict_s`` to judge the last.

    Transfers end by ``deadline`` (time.monotonic). Up to ``form_left_s`` of forming groups moves it. Ranks exchange
    durations, because their clocks differ.
    """

    def __init__(self, config: WeightSyncConfig) -> None:
        self._timeout_s, self._verdict_s, self._form_s = config.timeout_s, config.verdict_s, config.form_s
        self.restart()

    def restart(self) -> None:
        self.deadline, self.form_left_s = time.monotonic() + self._timeout_s, 2 * self._form_s

    @contextmanager
    def forming(self) -> Iterator[float]:
        """Yield the deadline (time.monotonic) of forming groups once; the time spent here is not the transfers'."""
        started, granted_s = time.monotonic(), min(self._form_s, self.form_left_s)
        self.deadline += granted_s
        try:
            yield min(started + self._form_s, self.deadline)
        finally:
            spent_s = min(time.monotonic() - started, granted_s)
            self.deadline -= granted_s - spent_s
            self.form_left_s -= spent_s

    @property
    def left_s(self) -> float:
        """Time until the publish has ended on rank 0 at the latest."""
        return self.deadline + self._verdict_s - time.monotonic()

    def adopt(self, left_s: float, form_left_s: float) -> None:
        """Take over rank 0's remaining time."""
        self.deadline, self.form_left_s = time.monotonic() + left_s - self._verdict_s, form_left_s

    @property
    def patience_s(self) -> float:
        """Time to wait for other ranks: until rank 0 has ended at the latest, and ``SLACK_S`` longer."""
        return max(self.left_s, 0.0) + SLACK_S


@dataclass(slots=True, kw_only=True)
class PublishJob:
    """One publish in progress at one rank. ``own`` is set before ``packed`` if packing failed on this rank.

    ``number`` is its place in the ``JobQueue``, the same on all ranks. A ``repeated`` version was sent before. ``met``:
    all ranks have started it. Rank 0 has ``progress``, None before its first step, and ``full_s``, when a server had no
    slot for it for the first time (time.monotonic, like ``began_s``). ``dropped``: its adapter is no longer wanted.
    ``waited``: ``wait`` has reported the outcome. Packing counts in ``cast``. A copy by ``replace`` shares the shard.
    ``merging`` packs merged weights as it is iterated.
    """

    manifest: ShardManifest
    layout: AdapterLayout
    shard: PackedShard
    probe: ProbeExpectation | None
    began_s: float
    budget: Budget
    repeated: bool = False
    cast: CastLoss | None = None
    packed: threading.Event = field(default_factory=threading.Event)
    pack_ms: float = 0.0
    own: Failure | None = None
    merging: Iterator[int] | None = None
    number: int = field(default=-1, init=False)
    met: bool = field(default=False, init=False)
    progress: Progress | None = field(default=None, init=False)
    full_s: float | None = field(default=None, init=False)
    dropped: bool = field(default=False, init=False)
    outcome: Future[PublishReport] = field(default_factory=Future, init=False)
    waited: bool = field(default=False, init=False)

    @property
    def ref(self) -> AdapterRef:
        return self.manifest.ref

    def waits_for_slot(self) -> bool:
        """Whether a server had no slot for it and it has not ended since (rank 0)."""
        return self.full_s is not None and not self.outcome.done()

    def failed(self) -> bool:
        """Whether ``wait`` would raise at once."""
        return self.outcome.done() and self.outcome.exception() is not None

    def wait(self) -> PublishReport:
        """Wait until the version serves and was probed on every remaining server. Idempotent.

        Raises the same on all ranks: ManifestError (refused), AdapterError (the servers cannot serve this layout),
        PublishError (too few servers remain at the deadline) or ParityError.
        """
        try:
            return self.outcome.result()
        finally:
            self.waited = self.outcome.done()


class JobQueue:
    """The publishes of one trainer rank that have not ended, in the order in which its main thread started them.

        rank 0    A (no slot) -> yields to B -> B ends -> A again -> A ends
        rank 1    A           -> yields to B, which it waits for if its main thread is late -> ...

    The main thread puts jobs, the publisher thread takes them and marks those that have ended. All ranks start
    publishes in the same order, so numbers name the same publish on all ranks. The oldest one goes first; rank 0 alone
    decides that another one goes ahead of it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, PublishJob] = {}  # by number, in order
        self._begun, self._closed = 0, False

    def put(self, job: PublishJob) -> None:
        with self._changed:
            job.number = self._begun
            self._begun += 1
            self._waiting[job.number] = job
            self._changed.notify_all()

    def close(self) -> None:
        """No ``put`` may follow; the jobs that are there still run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def oldest(self) -> PublishJob | None:
        """Wait for a job and return the oldest one; None if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return next(iter(self._waiting.values()), None)

    def take(self, number: int, timeout_s: float) -> PublishJob:
        """Return job ``number``, which rank 0 has started already. Raises PublishError if this rank does not."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._waiting or self._closed, timeout_s)
            if number not in self._waiting:
                raise PublishError(f"rank 0 started publish {number}, this rank did not; see its log")
            return self._waiting[number]

    def after(self, job: PublishJob) -> int | None:
        """Return the number of the job whose turn is after ``job``; None if it is the only one."""
        with self._changed:
            others = [number for number in self._waiting if number != job.number]
        return next((number for number in others if number > job.number), next(iter(others), None))

    def end(self, job: PublishJob) -> None:
        with self._changed:
            del self._waiting[job.number]

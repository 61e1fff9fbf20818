"""One publish at one trainer rank: its time budget, its state, its place in the queue, and the main thread's handle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from areal_lora.algorithms.merging import CastLoss
from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import PublishError
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.decisions import Failure, Progress
from areal_lora.weight_sync.trainer.packed_shard import PackedShard
from areal_lora.weight_sync.trainer.report import PublishReport

SLACK_S = 10.0
"""Added to rank 0's remaining time when a rank waits for other ranks: they run on busy machines."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """Time of one publish, shared by all ranks: ``timeout_s`` for transfers, then ``verdict_s`` to judge the last.

    Transfers end by ``deadline`` (time.monotonic). Ranks exchange durations, because their clocks differ.
    """

    timeout_s: float
    verdict_s: float
    deadline: float

    @classmethod
    def start(cls, config: WeightSyncConfig) -> Self:
        timeout_s = config.timeout_s
        return cls(timeout_s=timeout_s, verdict_s=config.verdict_s, deadline=time.monotonic() + timeout_s)

    def restart(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    @property
    def left_s(self) -> float:
        """Time until the publish has ended on rank 0 at the latest."""
        return self.deadline + self.verdict_s - time.monotonic()

    def adopt(self, left_s: float) -> None:
        """Take over rank 0's remaining time."""
        self.deadline = time.monotonic() + left_s - self.verdict_s

    @property
    def patience_s(self) -> float:
        """Time to wait for other ranks: until rank 0 has ended at the latest, and ``SLACK_S`` longer."""
        return max(self.left_s, 0.0) + SLACK_S


@dataclass(slots=True, kw_only=True)
class Job:
    """One publish at one rank. ``own`` is set before ``packed`` if packing failed on this rank.

    ``number`` is its place in the ``JobQueue``, the same on all ranks. A ``repeated`` version was sent before.
    ``met``: the gates of all ranks are open. ``progress`` is rank 0's, and so is ``full_s``, when
    a server had no slot for it for the first time (time.monotonic). ``dropped``: its adapter is no longer wanted.

    ``gate`` returns when the transfer may start; it took ``gate_ms``. ``began_s`` is time.monotonic. Packing counts in
    ``cast``.
    """

    manifest: ShardManifest
    layout: AdapterLayout
    shard: PackedShard
    probe: ProbeExpectation | None
    began_s: float
    budget: Budget
    repeated: bool = False
    number: int = -1
    met: bool = False
    progress: Progress = field(default_factory=Progress)
    full_s: float | None = None
    dropped: bool = False
    gate: Callable[[], None] | None = None
    gate_ms: float = 0.0
    cast: CastLoss | None = None
    packed: threading.Event = field(default_factory=threading.Event)
    pack_ms: float = 0.0
    own: Failure | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    answer: PublishReport | Exception | None = None

    @property
    def ref(self) -> AdapterRef:
        return self.manifest.ref


class PublishHandle:
    """A publish in progress."""

    def __init__(self, job: Job) -> None:
        self.ref = job.ref
        self._job = job
        self.waited = False
        """Whether ``wait`` has reported the outcome."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._job.ended.is_set()

    def failed(self) -> bool:
        """Whether ``wait`` would raise at once."""
        return self.done() and not isinstance(self._job.answer, PublishReport)

    def abandon(self) -> None:
        """Wait until the publish has ended, well or not; it waits for no slot any more."""
        self._job.dropped = True
        self._job.ended.wait()

    def wait(self) -> PublishReport:
        """Wait until the version serves and was probed on every remaining server. Idempotent.

        Raises the same on all ranks: ManifestError (refused), AdapterError (the servers cannot
        serve this layout), PublishError (too few servers remain at the deadline) or ParityError.
        """
        self._job.ended.wait()
        self.waited = True
        if isinstance(self._job.answer, PublishReport):
            return self._job.answer
        assert self._job.answer is not None
        raise self._job.answer


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
        self._waiting: dict[int, Job] = {}  # by number, in order
        self._begun, self._closed = 0, False

    def put(self, job: Job) -> None:
        """Give ``job`` the next number."""
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

    def oldest(self) -> Job | None:
        """Wait for a job and return the oldest one; None if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return next(iter(self._waiting.values()), None)

    def take(self, number: int, timeout_s: float) -> Job:
        """Return job ``number``, which rank 0 has started already. Raises PublishError if this rank does not."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._waiting or self._closed, timeout_s)
            if number not in self._waiting:
                raise PublishError(f"rank 0 started publish {number}, this rank did not; see its log")
            return self._waiting[number]

    def after(self, job: Job) -> int | None:
        """Return the number of the job whose turn is after ``job``; None if it is the only one."""
        with self._changed:
            others = [number for number in self._waiting if number != job.number]
        return next((number for number in others if number > job.number), next(iter(others), None))

    def end(self, job: Job) -> None:
        with self._changed:
            del self._waiting[job.number]

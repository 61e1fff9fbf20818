"""Trainer side of a publish, one ``Publisher`` per trainer rank.

    main thread                  publisher thread of every rank                       servers
    publish ------------------>  rank 0: who takes part? changed: all connect anew    join
    pack bucket 0                rank 0: POST /admin/publish to all                   reserve a slot
    pack bucket 1 ...            sources: broadcast buckets as they get ready         receive, write
    train on ...                 tell each other how it went                          verify, commit
                                 rank 0: acknowledged by all? or servers lost:        acknowledge
                                         connect the others, send again
                                 rank 0: score the probe, compare, announce           score
    join (the next publish)  <-  all ranks hold the same report or error

A publish is a layout and a ``pack``: what the tensors mean is known to the caller and to the
servers, so other payloads (merged weights) need no second loop.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from areal_lora.config.models import WeightSyncConfig
from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import ArealLoraError, ManifestError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.link.groups import CPU, BroadcastGroup, GroupListener
from areal_lora.weight_sync.messages import ServerEndpoint, SourceEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.coordinator import Coordinator
from areal_lora.weight_sync.trainer.packed_shard import Pack, PackedShard
from areal_lora.weight_sync.trainer.steps import Failure, PublishReport, Sent, Step

SLACK_S = 10.0
"""How much longer than rank 0 may need, by ``Step.left_s``, another rank is waited for: they run on busy machines."""

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Job:
    """One publish at one rank. ``own`` is set before ``packed`` if packing failed here.

    ``gate`` returns when the transfer may begin; ``gate_ms`` is how long that took.
    """

    manifest: ShardManifest
    layout: AdapterLayout
    shard: PackedShard
    probe: ProbeExpectation | None
    began_s: float  # time.monotonic
    deadline: float  # time.monotonic
    gate: Callable[[], None] | None = None
    gate_ms: float = 0.0
    packed: threading.Event = field(default_factory=threading.Event)
    pack_ms: float = 0.0
    own: Failure | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    answer: PublishReport | Exception | None = None

    @property
    def ref(self) -> AdapterRef:
        return self.manifest.ref


class PublishHandle:
    """A publish under way. ``join`` may be called again: it repeats its answer."""

    def __init__(self, job: Job) -> None:
        self.ref = job.ref
        self._job = job
        self.joined = False
        """Whether ``join`` has told the outcome."""

    def done(self) -> bool:
        """Whether ``join`` would return at once."""
        return self._job.ended.is_set()

    def join(self) -> PublishReport:
        """Wait until the version serves and was probed on every server that is left.

        Raises the same on all ranks: ManifestError (refused), AdapterError (the servers cannot
        serve this layout), PublishError (too few servers left before the deadline) or ParityError.
        """
        self._job.ended.wait()
        self.joined = True
        if isinstance(self._job.answer, PublishReport):
            return self._job.answer
        assert self._job.answer is not None
        raise self._job.answer


class Publisher:
    """Publishes versions of one run's adapters to all servers that are there.

    ``publish`` is collective: all ranks call it in the same order from their main threads. All
    else between ranks happens in the publisher threads, which alone use ``exchange``. Rank 0 has
    a ``coordinator``; ``bind`` is this rank's own address, which the servers' workers must reach; they meet
    with the run's ``secret``;
    ``backend`` names a ``groups`` backend, ``device`` is what this rank computes on.
    """

    def __init__(
        self,
        *,
        run: str,
        config: WeightSyncConfig,
        exchange: Exchange,
        coordinator: Coordinator | None,
        secret: str,
        bind: str = "127.0.0.1",
        backend: str = "gloo",
        device: torch.device = CPU,
    ) -> None:
        self._secret = secret
        self._run_name, self._config, self._exchange, self._coordinator = run, config, exchange, coordinator
        self._bind, self._backend, self._device = bind, backend, device
        self._shards: dict[str, PackedShard] = {}
        self._newest: dict[str, Job] = {}
        self._group: BroadcastGroup | None = None
        self._previous: PublishHandle | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = watched_thread("publisher", self._work)

    def publish(
        self,
        ref: AdapterRef,
        parent: AdapterRef | None,
        layout: AdapterLayout,
        pack: Pack,
        base_digest: str,
        probe: ProbeExpectation | None,
        gate: Callable[[], None] | None = None,
    ) -> PublishHandle:
        """Start publishing ``ref``; this rank's shard of ``layout`` is packed before this returns.

        Servers prepare and the first buckets travel meanwhile, but no server hears of the version before
        ``gate``, called in the publisher thread of every rank, has returned; times and deadlines begin
        then, on all ranks at once. ``weight_sync.publish_s`` bounds the rest, retries included, except waiting
        while too few servers are left (``rejoin_s``). Only rank 0's ``probe`` is used. Joins the publish before first,
        if nobody did, and raises what that ended with. An error of ``pack`` that this library knows comes
        out of ``join`` on every rank, any other is raised here.
        """
        if self._previous is not None and not self._previous.joined:
            self._previous.join()
        now = time.monotonic()
        manifest = ShardManifest(
            run=self._run_name, ref=ref, parent=parent, base_digest=base_digest, layout=layout.digest
        )
        shard = self._shards.get(layout.digest)
        if shard is None:
            shard = self._shards[layout.digest] = PackedShard(layout, self._exchange.rank, self._device)
        shard.reset()
        job = Job(
            manifest=manifest,
            layout=layout,
            shard=shard,
            probe=probe,
            began_s=now,
            deadline=now + self._config.deadline_s,
            gate=gate,
        )
        handle = self._start(job)
        try:
            shard.pack(ref, pack)
        except ArealLoraError as e:
            job.own = Failure.of(e)
        except BaseException as e:
            job.own = Failure(kind="failed", message=f"packing {ref} at trainer rank {self._exchange.rank}: {e!r}")
            raise
        finally:
            job.pack_ms = (time.monotonic() - now) * 1e3
            job.packed.set()
        self._newest[ref.name] = job
        return handle

    def _start(self, job: Job) -> PublishHandle:
        self._previous = PublishHandle(job)
        self._jobs.put(job)
        return self._previous

    def again(self, name: str) -> PublishHandle:
        """Send the newest version of adapter ``name`` once more, after ``changed`` (collective).

        Its packed shard is still there; servers that serve the version already acknowledge it again.
        Joins the publish before first, like ``publish``.
        """
        if self._previous is not None and not self._previous.joined:
            self._previous.join()
        now = time.monotonic()
        deadline = now + self._config.deadline_s
        return self._start(
            replace(
                self._newest[name],
                began_s=now,
                deadline=deadline,
                gate=None,
                gate_ms=0.0,
                ended=threading.Event(),
                answer=None,
            )
        )

    def changed(self) -> bool:
        """Whether servers are there that are not members yet, or members do not answer (rank 0, not collective)."""
        return self._coordinator is not None and self._coordinator.changed()

    def close(self) -> None:
        """End the publisher thread after the publish under way, and leave the group of this rank."""
        self._jobs.put(None)
        self._thread.join()
        self._leave()
        if self._coordinator is not None:
            self._coordinator.close()

    # ------------------------------------------------------------ publisher thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.answer = self._run(job)
            except ArealLoraError as e:
                self._leave()
                job.answer = e
            except Exception as e:  # fault boundary: whatever it was, the main thread waits for an answer
                log.exception("publish of %s", job.ref)
                self._leave()
                job.answer = PublishError(f"{job.ref}: publisher thread of rank {self._exchange.rank}: {e!r}")
            job.ended.set()

    def _run(self, job: Job) -> PublishReport:
        self._meet(job)
        step = self._told(job, lambda c: c.open(job))
        while True:
            if step.failure is not None:
                raise step.failure.error()
            if step.report is not None:
                # The controller may be away for longer than the other ranks would wait: they have been told.
                if self._coordinator is not None:
                    self._coordinator.ended(job)
                return step.report
            if step.wait:
                step = self._told(job, lambda c: c.go_on(job))
                continue
            deadline = min(time.monotonic() + self._config.attempt_s, job.deadline)
            sent = self._attempt(job, step, deadline)
            raw = self._exchange.all_gather_bytes(msgspec.msgpack.encode(sent), self._patience_s(job))
            parts = [msgspec.msgpack.decode(r, type=Sent) for r in raw]
            step = self._told(job, lambda c, parts=parts: c.next_step(job, parts))  # type: ignore[misc]

    def _meet(self, job: Job) -> None:
        """Begin when all ranks' gates are open; raise on all what was raised by one."""
        failure: Failure | None = None
        try:
            if job.gate is not None:
                job.gate()
        except ArealLoraError as e:
            failure = Failure.of(e)
        for raw in self._exchange.all_gather_bytes(msgspec.msgpack.encode(failure)):
            if (failed := msgspec.msgpack.decode(raw, type=Failure | None)) is not None:
                raise failed.error()
        now = time.monotonic()
        job.deadline = now + self._config.deadline_s
        if job.gate is not None:
            job.gate_ms, job.began_s = (now - job.began_s) * 1e3, now

    def _told(self, job: Job, decide: Callable[[Coordinator], Step]) -> Step:
        """Rank 0's step and how much time is left, on every rank."""
        if self._coordinator is not None:
            mine = decide(self._coordinator)
            if mine.wait:
                job.deadline = time.monotonic() + self._config.deadline_s
            left_s = job.deadline + self._config.verdict_s - time.monotonic()
            mine = msgspec.structs.replace(mine, left_s=left_s)
            self._exchange.broadcast_bytes(msgspec.msgpack.encode(mine), self._patience_s(job))
            return mine
        raw = self._exchange.broadcast_bytes(None, self._patience_s(job))
        step = msgspec.msgpack.decode(raw, type=Step)
        job.deadline = time.monotonic() + step.left_s - self._config.verdict_s
        return step

    def _attempt(self, job: Job, step: Step, deadline: float) -> Sent:
        began = time.perf_counter()
        wire: Failure | None = None
        try:
            if step.connect is not None:
                self._connect(job, step.connect, deadline)
            if self._coordinator is not None and step.connect is not None:
                self._coordinator.announce(job, deadline)
            if self._group is not None and job.shard.is_source:
                job.shard.send(self._group, deadline)
        except (PublishError, ManifestError) as e:
            # Without this member the receivers hear of the failure at once instead of at their deadline.
            self._leave()
            wire = Failure.of(e)
        send_ms = (time.perf_counter() - began) * 1e3
        own = job.own
        if not job.packed.wait(max(job.deadline - time.monotonic(), 0.0)):
            rank = self._exchange.rank
            own = Failure(kind="failed", message=f"{job.ref} was not packed in time at trainer rank {rank}")
        return Sent(
            ref=job.ref,
            layout=job.layout.digest,
            sum=job.shard.sum,
            pack_ms=job.pack_ms,
            send_ms=send_ms,
            own=own or job.own,
            wire=wire,
        )

    def _connect(self, job: Job, members: Sequence[ServerEndpoint], deadline: float) -> None:
        """Make the groups anew: sources listen, rank 0 tells every server, all meet.

        Raises PublishError on every rank if a server or worker does not come in time.
        """
        self._leave()
        left_s = deadline - time.monotonic()
        listener = None
        if job.shard.is_source:
            listener = GroupListener(
                source=self._exchange.rank,
                bind=self._bind,
                world=1 + sum(s.workers for s in members),
                backend=self._backend,
                timeout_s=left_s,
                bucket_bytes=int(self._config.bucket_mib * 2**20),
                secret=self._secret,
                device=self._device,
            )
        try:
            gathered = self._exchange.all_gather_bytes(
                msgspec.msgpack.encode(listener and listener.endpoint), self._patience_s(job)
            )
            endpoints = [e for raw in gathered if (e := msgspec.msgpack.decode(raw, type=SourceEndpoint | None))]
            if self._coordinator is not None:
                self._coordinator.join(members, endpoints, deadline)
        except BaseException:
            if listener is not None:
                listener.close()
            raise
        failure: Failure | None = None
        try:
            if listener is not None:
                self._group = listener.accept()
            if self._coordinator is not None:
                self._coordinator.joined()
        except (PublishError, ManifestError) as e:
            failure = Failure.of(e)
        # Nobody sends unless all have met: the servers are told of the version only then.
        raws = self._exchange.all_gather_bytes(msgspec.msgpack.encode(failure), self._patience_s(job))
        for raw in raws:
            if (failed := msgspec.msgpack.decode(raw, type=Failure | None)) is not None:
                raise failed.error()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _patience_s(self, job: Job) -> float:
        """How long other ranks are waited for: until rank 0 has come to an end at the latest, and a little longer."""
        return max(job.deadline + self._config.verdict_s - time.monotonic(), 0.0) + SLACK_S

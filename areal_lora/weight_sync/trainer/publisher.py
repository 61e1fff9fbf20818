"""Trainer side of a publish, one ``Publisher`` per trainer rank.

    main thread                  publisher thread of every rank                       servers
    publish ------------------>  rank 0: who takes part? changed: all form groups     join
    pack bucket 0                rank 0: POST /admin/publish to all                   reserve a slot
    pack bucket 1 ...            sources: broadcast buckets as they get ready         receive, write
    train on ...                 exchange the results of the attempt                  verify, commit
                                 rank 0: acknowledged by all? or servers lost:        acknowledge
                                         form groups with the others, send again
                                 rank 0: score the probe, compare, announce           score
    wait (the next publish)  <-  all ranks hold the same report or error

A publish is a layout and a ``pack``. Only the caller and the servers know the meaning of the
tensors, so other payloads (merged weights) need no second loop.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from areal_lora.config.models import WeightSyncConfig
from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import ArealLoraError, ManifestError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.link.groups import CPU
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.job import Budget, Job, PublishHandle
from areal_lora.weight_sync.trainer.packed_shard import Pack, PackedShard
from areal_lora.weight_sync.trainer.report import PublishReport
from areal_lora.weight_sync.trainer.role import Attempted, Begun, Event, Role, Waited
from areal_lora.weight_sync.trainer.source_group import SourceGroup
from areal_lora.weight_sync.trainer.spare_time import SpareTime
from areal_lora.weight_sync.trainer.steps import Attempt, Fail, Failure, Finish, Sent, Wait, raise_on_all

log = get_logger(__name__)


class Publisher:
    """Publish versions of one run's adapters to all available servers.

    ``publish`` is collective: all ranks call it in the same order from their main threads. Everything
    else between ranks happens in the publisher threads; no other thread uses ``exchange``. ``role`` is a
    ``Leader`` on rank 0 and a ``Follower`` on the other ranks. The further arguments are those of ``SourceGroup``.
    """

    def __init__(
        self,
        *,
        run: str,
        config: WeightSyncConfig,
        exchange: Exchange,
        role: Role,
        secret: str,
        bind: str = "127.0.0.1",
        backend: str = "gloo",
        device: torch.device = CPU,
    ) -> None:
        self._run_name, self._config, self._exchange, self._role = run, config, exchange, role
        self._device = device
        self._group = SourceGroup(
            config=config, exchange=exchange, secret=secret, bind=bind, backend=backend, device=device
        )
        self._shards: dict[str, PackedShard] = {}
        self._newest: dict[str, Job] = {}
        self._spare = SpareTime()
        self._last: Job | None = None  # of ``publish``, not of ``again``
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

        No server receives the version before ``gate``, called in the publisher thread of every rank, has
        returned; times and deadlines begin then, on all ranks at once. ``weight_sync.publish_s`` bounds the
        rest, retries included, except waiting while too few servers remain (``rejoin_s``). Only rank 0's
        ``probe`` is used. Waits for the previous publish first and raises its error, unless ``wait`` has
        reported it. ``wait`` raises an ArealLoraError of ``pack`` on every rank; any other error of ``pack``
        is raised here.
        """
        self._await_previous()
        timing = self._last.timing() if self._last is not None else None
        if timing is not None:
            self._spare.add(timing)
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
            budget=Budget.start(self._config),
            gate=gate,
            pace_s=self._spare.pace_s(),
        )
        self._last = job
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

    def again(self, name: str) -> PublishHandle:
        """Send the newest version of adapter ``name`` again, after ``changed`` (collective).

        Uses the version's packed shard; servers that serve the version acknowledge it again.
        Waits for the previous publish first, like ``publish``.
        """
        self._await_previous()
        return self._start(
            replace(
                self._newest[name],
                began_s=time.monotonic(),
                budget=Budget.start(self._config),
                gate=None,
                gate_ms=0.0,
                pace_s=0.0,
                awaited_s=None,
                announced_pace_s=0.0,
                ended=threading.Event(),
                answer=None,
            )
        )

    def changed(self) -> bool:
        """Whether servers that are not members are available, or members do not answer (rank 0, not collective)."""
        return self._role.changed()

    def close(self) -> None:
        """End the publisher thread after the publish in progress, and leave the group of this rank."""
        self._jobs.put(None)
        self._thread.join()
        self._group.leave()
        self._role.close()

    def _await_previous(self) -> None:
        if self._previous is not None and not self._previous.waited:
            self._previous.wait()

    def _start(self, job: Job) -> PublishHandle:
        self._previous = PublishHandle(job, self._role.hurry)
        self._jobs.put(job)
        return self._previous

    # ------------------------------------------------------------ publisher thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.answer = self._run(job)
            except ArealLoraError as e:
                self._group.leave()
                job.answer = e
            except Exception as e:  # fault boundary: the main thread waits for an answer in any case
                log.exception("publish of %s", job.ref)
                self._group.leave()
                job.answer = PublishError(f"{job.ref}: publisher thread of rank {self._exchange.rank}: {e!r}")
            job.ended.set()

    def _run(self, job: Job) -> PublishReport:
        self._meet(job)
        event: Event = Begun()
        while True:
            match self._role.decide(job, event, self._exchange):
                case Fail(failure=failure):
                    raise failure.error()
                case Finish(report=report):
                    # The controller may be away for longer than other ranks would wait: they have received the step.
                    self._role.conclude(job)
                    return report
                case Wait():
                    event = Waited()
                case Attempt() as attempt:
                    event = Attempted(self._shared(job, self._attempt(job, attempt)))

    def _meet(self, job: Job) -> None:
        """Begin when the gates of all ranks are open; raise one rank's error on all ranks."""
        failure: Failure | None = None
        try:
            if job.gate is not None:
                job.gate()
        except ArealLoraError as e:
            failure = Failure.of(e)
        raise_on_all(self._exchange, failure)
        job.budget.restart()
        if job.gate is not None:
            now = time.monotonic()
            job.gate_ms, job.began_s = (now - job.began_s) * 1e3, now

    def _attempt(self, job: Job, attempt: Attempt) -> Sent:
        began = time.perf_counter()
        deadline = min(time.monotonic() + self._config.attempt_s, job.budget.deadline)
        wire: Failure | None = None
        try:
            if attempt.members is not None:
                self._group.form(job, attempt.members, self._role, deadline)
            self._role.announce(job, deadline)
            self._group.send(job, deadline)
        except (PublishError, ManifestError) as e:
            # Without this member the receivers notice the failure at once instead of at their deadline.
            self._group.leave()
            wire = Failure.of(e)
        send_ms = (time.perf_counter() - began) * 1e3
        own = job.own
        if not job.packed.wait(max(job.budget.deadline - time.monotonic(), 0.0)):
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

    def _shared(self, job: Job, sent: Sent) -> list[Sent]:
        """Results of the attempt at all ranks, in rank order."""
        raw = self._exchange.all_gather_bytes(msgspec.msgpack.encode(sent), job.budget.patience_s)
        return [msgspec.msgpack.decode(r, type=Sent) for r in raw]

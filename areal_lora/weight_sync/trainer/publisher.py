"""Trainer side of a publish, one ``Publisher`` per trainer rank.

    main thread                  publisher thread of every rank                       servers
    publish ------------------>  rank 0: members? changed:         all form groups     join
    pack bucket 0                rank 0: POST /admin/publish to all                   reserve a slot
    pack bucket 1 ...            sources: broadcast buckets as they get ready         receive, write
    train on ...                 exchange the results of the attempt                  verify, commit
                                 rank 0: acknowledged by all? or servers lost:        acknowledge
                                         form groups with the others, send again
                                 rank 0: score the probe, compare, announce           score
    wait (the next publish)  <-  all ranks hold the same report or error

A publish is a layout and a ``pack``. Only the caller and the servers know the meaning of the
tensors: merged weights are another layout and another ``pack``.

Each adapter has its own memory, versions and errors. Publishes go one after the other, in the order in which
they started (``job``); one that waits for a slot lets the others go ahead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import torch

from areal_lora.algorithms.merging import CastLoss
from areal_lora.config.models import WeightSyncConfig
from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import ArealLoraError, ManifestError, PublishError
from areal_lora.processes.startup import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.link.broadcast_groups import CPU
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.decisions import (
    Attempt,
    Fail,
    Failure,
    FinishPublish,
    Progress,
    Sent,
    Wait,
    Yield,
    agree,
)
from areal_lora.weight_sync.trainer.packed_shard import Pack, PackedShard
from areal_lora.weight_sync.trainer.publish_job import Budget, Job, JobQueue, PublishHandle
from areal_lora.weight_sync.trainer.report import PublishReport
from areal_lora.weight_sync.trainer.role import AttemptOutcome, Event, Role, StartOutcome, WaitOutcome
from areal_lora.weight_sync.trainer.source_group import SourceGroup

log = get_logger(__name__)


@dataclass(slots=True)
class _Lane:
    """One adapter at one rank. ``newest`` is the job that packed ``shard`` last, ``previous`` what ``wait`` reports."""

    shard: PackedShard
    newest: Job | None = None
    previous: PublishHandle | None = None

    def await_previous(self) -> None:
        if self.previous is not None and not self.previous.waited:
            self.previous.wait()


class Publisher:
    """Publish versions of one run's adapters to all available servers.

    ``publish``, ``again`` and ``drop`` are collective: all ranks call them in the same order from their main threads.
    Everything else between ranks happens in the publisher threads; no other thread uses ``exchange``. ``role`` is a
    ``Leader`` on rank 0 and a ``Follower`` on the other ranks. The further arguments are those of ``SourceGroup``;
    the default of ``sources`` is that of one rank.
    """

    def __init__(
        self,
        *,
        run: str,
        config: WeightSyncConfig,
        exchange: Exchange,
        role: Role,
        secret: str,
        sources: frozenset[int] = frozenset({0}),
        bind: str = "127.0.0.1",
        backend: str = "gloo",
        device: torch.device = CPU,
    ) -> None:
        self._run_name, self._config, self._exchange, self._role = run, config, exchange, role
        self._device, self._sources = device, sources
        self._group = SourceGroup(
            config=config, exchange=exchange, sources=sources, secret=secret, bind=bind, backend=backend, device=device
        )
        self._lanes: dict[str, _Lane] = {}
        self._jobs = JobQueue()
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
        cast: CastLoss | None = None,
    ) -> PublishHandle:
        """Start publishing ``ref``; this rank's shard of ``layout`` is packed before this returns.

        No server receives the version before ``gate``, called in the publisher thread of every rank, has
        returned; times and deadlines start then, on all ranks at once. ``weight_sync.publish_s`` bounds the
        rest, retries included, except waiting while too few servers remain (``rejoin_s``), for a slot (``slot_s``) and
        for publishes of other adapters. Only rank 0's ``probe`` is used. Waits for the adapter's previous publish
        first and raises its error, unless ``wait`` has reported it. ``wait`` raises an ArealLoraError of ``pack`` on
        every rank; any other error of ``pack`` is raised here. ``pack`` counts in ``cast``, if it
        casts; the report has the sums of all ranks.
        """
        lane = self._lane(ref.name, layout)
        now = time.monotonic()
        manifest = ShardManifest(
            run=self._run_name, ref=ref, parent=parent, base_digest=base_digest, layout=layout.digest
        )
        shard = lane.shard
        shard.reset()
        job = Job(
            manifest=manifest,
            layout=layout,
            shard=shard,
            probe=probe,
            began_s=now,
            budget=Budget.start(self._config),
            gate=gate,
            cast=cast,
        )
        lane.newest = job
        handle = self._start(lane, job)
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
        return handle

    def again(self, name: str) -> PublishHandle:
        """Send the newest version of adapter ``name`` again, after ``changed`` (collective).

        Uses the version's packed shard; servers that serve the version acknowledge it again. If all members serve it
        and nothing has changed, nothing is sent. Waits for the adapter's previous publish first, like ``publish``.
        """
        lane = self._lanes[name]
        lane.await_previous()
        assert lane.newest is not None
        return self._start(
            lane,
            replace(
                lane.newest,
                repeated=True,
                met=False,
                progress=Progress(),
                full_s=None,
                began_s=time.monotonic(),
                budget=Budget.start(self._config),
                gate=None,
                gate_ms=0.0,
                ended=threading.Event(),
                answer=None,
            ),
        )

    def drop(self, name: str) -> None:
        """Forget adapter ``name`` after its publish in progress, however that ends (collective).

        The servers free what they hold of it as soon as no request uses it.
        """
        lane = self._lanes.pop(name, None)
        if lane is not None and lane.previous is not None:
            lane.previous.abandon()
        self._role.drop(name)

    def changed(self) -> bool:
        """Whether a server does not hold the newest version of each adapter, or members do not answer.

        Rank 0, not collective.
        """
        return self._role.changed()

    def close(self) -> None:
        """End the publisher thread after the publish in progress, and leave the group of this rank."""
        self._jobs.close()
        self._thread.join()
        self._group.leave()
        self._role.close()

    def _lane(self, name: str, layout: AdapterLayout) -> _Lane:
        """Return the adapter's lane, with its shard free to be packed in ``layout``."""
        if foreign := {shard.source for shard in layout.shards} - self._sources:
            raise PublishError(
                f"{name}: ranks {sorted(foreign)} own tensors and are no sources ({sorted(self._sources)})"
            )
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(PackedShard(layout, self._exchange.rank, self._device))
        lane.await_previous()
        if lane.shard.layout.digest != layout.digest:
            lane.shard = PackedShard(layout, self._exchange.rank, self._device)
        return lane

    def _start(self, lane: _Lane, job: Job) -> PublishHandle:
        lane.previous = PublishHandle(job)
        self._jobs.put(job)
        return lane.previous

    # ------------------------------------------------------------ publisher thread

    def _work(self) -> None:
        job = self._jobs.oldest()
        while job is not None:
            try:
                outcome = self._run(job)
                if isinstance(outcome, Yield):
                    job = self._jobs.take(outcome.number, job.budget.patience_s)
                    continue
                job.answer = outcome
            except ArealLoraError as e:
                self._group.leave()
                job.answer = e
            except Exception as e:  # fault boundary: the main thread waits for an answer in any case
                log.exception("publish of %s", job.ref)
                self._group.leave()
                job.answer = PublishError(f"{job.ref}: publisher thread of rank {self._exchange.rank}: {e!r}")
            self._jobs.end(job)
            job.ended.set()
            del job  # or it would keep the memory of a dropped adapter's shard until the next publish
            job = self._jobs.oldest()

    def _run(self, job: Job) -> PublishReport | ArealLoraError | Yield:
        """Run ``job`` until it ends or another one goes ahead. Raises where members may be out of step."""
        event: Event = WaitOutcome() if job.met else StartOutcome()
        if not job.met and (failure := self._meet(job)) is not None:
            return failure.error()
        job.budget.restart()
        while True:
            self._role.next_turn(self._jobs.after(job))
            match self._role.decide(job, event, self._exchange):
                case Fail(failure=failure, intact=intact):
                    if not intact:
                        raise failure.error()
                    return failure.error()
                case FinishPublish(report=report):
                    # The controller may be away for longer than other ranks would wait: they have received the step.
                    self._role.conclude(job)
                    return report
                case Wait():
                    event = WaitOutcome()
                case Yield() as ahead:
                    return ahead
                case Attempt() as attempt:
                    event = AttemptOutcome(self._shared(job, self._attempt(job, attempt)))

    def _meet(self, job: Job) -> Failure | None:
        """Start when the gates of all ranks are open; return one rank's error on all ranks."""
        failure: Failure | None = None
        try:
            if job.gate is not None:
                job.gate()
        except ArealLoraError as e:
            failure = Failure.of(e)
        failed = agree(self._exchange, failure)
        job.met = True
        if job.gate is not None:
            now = time.monotonic()
            job.gate_ms, job.began_s = (now - job.began_s) * 1e3, now
        return failed

    def _attempt(self, job: Job, attempt: Attempt) -> Sent:
        started = time.perf_counter()
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
        send_ms = (time.perf_counter() - started) * 1e3
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
            cast=None if job.cast is None else job.cast.sums(),
        )

    def _shared(self, job: Job, sent: Sent) -> list[Sent]:
        """Results of the attempt at all ranks, in rank order."""
        raw = self._exchange.all_gather_bytes(msgspec.msgpack.encode(sent), job.budget.patience_s)
        return [msgspec.msgpack.decode(r, type=Sent) for r in raw]

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

import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

import msgspec
import torch

from areal_lora.algorithms.merging import CastLoss
from areal_lora.config.models import WeightSyncConfig
from areal_lora.config.sizing.slots import bucket_of
from areal_lora.distributed.store import Exchange
from areal_lora.errors import ArealLoraError, ManifestError, PublishError
from areal_lora.platforms.device import lane_of, select_device
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout, Payload
from areal_lora.weight_sync.link.broadcast_groups import CPU, BroadcastGroup, GroupListener
from areal_lora.weight_sync.link.relays import RELAYED_BYTES, RelayGroup
from areal_lora.weight_sync.manifest import shard_keys
from areal_lora.weight_sync.messages import SourceEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer import decisions
from areal_lora.weight_sync.trainer.decisions import Failure, PublishReport, Sent
from areal_lora.weight_sync.trainer.gathering import PlaceGather
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publish_job import Budget, JobQueue, Pack, PackedShard, PublishJob

log = get_logger(__name__)


@dataclass(slots=True)
class _Lane:
    """One adapter at one rank. ``newest`` is the job that packed ``shard`` last, ``previous`` the last one.

    ``first``: the first version of this session of the trainer, from which it has resumed.
    """

    shard: PackedShard
    first: int
    newest: PublishJob | None = None
    previous: PublishJob | None = None

    def await_previous(self) -> None:
        if self.previous is not None and not self.previous.waited:
            self.previous.wait()


class Publisher:
    """Publish versions of one run's adapters to all available servers.

    ``publish``, ``again`` and ``drop`` are collective: all ranks call them in the same order from their main threads.
    Everything else between ranks happens in the publisher threads; no other thread uses ``exchange``. Rank 0 has the
    ``leader``, whose steps the other ranks take over. A rank that owns tensors of an adapter has a group with the
    workers of all members. ``bind`` is this rank's own address, as workers reach it; ``backend`` names a
    ``link.backends`` row; ``device`` is the device that this rank computes on. With ``gather`` one rank sends what
    several own.
    """

    def __init__(
        self,
        *,
        run: str,
        config: WeightSyncConfig,
        exchange: Exchange,
        secret: str,
        leader: Leader | None = None,
        bind: str = "127.0.0.1",
        backend: str = "gloo",
        device: torch.device = CPU,
        gather: PlaceGather | None = None,
    ) -> None:
        self._run_name, self._config, self._exchange, self._leader = run, config, exchange, leader
        self._secret, self._bind, self._backend, self._device = secret, bind, backend, device
        self._gather = gather
        self._group: BroadcastGroup | None = None
        self._stores: dict[str, GroupListener] = {}  # of the groups below relays, by the relay's name
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
        cast: CastLoss | None = None,
    ) -> PublishJob:
        """Start publishing ``ref``; this rank's shard of ``layout`` is packed before this returns.

        Merged weights, of the adapter as it is now, are packed in the publisher thread.

        The first version of an adapter is the one that the trainer has loaded (`ShardManifest.resumed_from`).
        ``weight_sync.publish_s`` bounds a publish, retries included, except merging, and waiting while too few servers
        remain (``rejoin_s``), for a slot (``slot_s``) and for publishes of other adapters. Only rank 0's ``probe`` is
        used. Waits for the adapter's previous publish first and raises its error, unless ``wait`` has reported it.
        ``wait`` raises an ArealLoraError of ``pack``'s iterator on every rank; any other error of ``pack`` is raised
        here. ``pack`` counts in ``cast``; the report has the sums of all ranks.
        """
        if self._gather is not None:
            layout, pack = self._gather.of(layout, pack)
        lane = self._lanes.get(ref.name)
        if lane is not None:
            lane.await_previous()
        if lane is None or lane.shard.layout.digest != layout.digest:
            shard = PackedShard(layout, self._exchange.rank, shard_keys(self._secret), self._device)
            lane = self._lanes[ref.name] = replace(lane, shard=shard) if lane else _Lane(shard, ref.version)
        manifest = ShardManifest(
            run=self._run_name,
            ref=ref,
            parent=parent,
            base_digest=base_digest,
            layout=layout.digest,
            resumed_from=lane.first,
        )
        lane.shard.reset()
        job = PublishJob(
            manifest=manifest,
            layout=layout,
            shard=lane.shard,
            probe=probe,
            began_s=time.monotonic(),
            budget=Budget(self._config),
            cast=cast,
        )
        lane.newest = job
        if layout.payload is Payload.MERGED:
            job.merging = pack(lane.shard.flat)
            return self._start(lane, job)
        self._start(lane, job)
        self._pack(job, pack)
        return job

    def again(self, name: str) -> PublishJob:
        """Send the newest version of adapter ``name`` again, after ``changed`` (collective).

        Uses the version's packed shard; servers that serve the version acknowledge it again. If all members serve it
        and nothing has changed, nothing is sent. Waits for the adapter's previous publish first, like ``publish``.
        """
        lane = self._lanes[name]
        lane.await_previous()
        assert lane.newest is not None
        budget = Budget(self._config)
        return self._start(lane, replace(lane.newest, repeated=True, began_s=time.monotonic(), budget=budget))

    def drop(self, name: str) -> None:
        """Forget adapter ``name`` after its publish in progress, however that ends (collective).

        The servers free what they hold of it as soon as no request uses it.
        """
        lane = self._lanes.pop(name, None)
        if lane is not None and lane.previous is not None:
            lane.previous.dropped = True  # it waits for no slot any more
            wait([lane.previous.outcome])
        if self._leader is not None:
            self._leader.drop(name)

    def changed(self) -> bool:
        """Whether a server does not hold the newest version of each adapter, or members do not answer.

        Rank 0, not collective.
        """
        return self._leader is not None and self._leader.changed()

    def close(self) -> None:
        """End the publisher thread after the publish in progress, and leave the group of this rank."""
        self._jobs.close()
        self._thread.join()
        self._leave()
        for listener in self._stores.values():
            listener.close()
        if self._leader is not None:
            self._leader.close()

    def _pack(self, job: PublishJob, pack: Pack) -> None:
        started = time.monotonic()
        try:
            job.shard.pack(job.ref, pack)
        except ArealLoraError as e:
            job.own = Failure.of(e)
        except BaseException as e:
            job.own = Failure(kind="failed", message=f"packing {job.ref} at trainer rank {self._exchange.rank}: {e!r}")
            raise
        finally:
            job.pack_ms = (time.monotonic() - started) * 1e3
            job.packed.set()

    def _start(self, lane: _Lane, job: PublishJob) -> PublishJob:
        lane.previous = job
        self._jobs.put(job)
        return job

    # ------------------------------------------------------------ publisher thread

    def _work(self) -> None:
        select_device(self._device)
        job = self._jobs.oldest()
        while job is not None:
            try:
                outcome = self._run(job)
                if isinstance(outcome, decisions.Yield):
                    job = self._jobs.take(outcome.number, job.budget.patience_s)
                    continue
            except ArealLoraError as e:
                self._leave()
                outcome = e
            except Exception as e:  # fault boundary: the main thread waits for an answer in any case
                log.exception("publish of %s", job.ref)
                self._leave()
                outcome = PublishError(f"{job.ref}: publisher thread of rank {self._exchange.rank}: {e!r}")
            self._jobs.end(job)
            if isinstance(outcome, PublishReport):
                job.outcome.set_result(outcome)
            else:
                job.outcome.set_exception(outcome)
            del job, outcome  # or they would keep the memory of a dropped adapter's shard until the next publish
            job = self._jobs.oldest()

    def _run(self, job: PublishJob) -> PublishReport | ArealLoraError | decisions.Yield:
        """Run ``job`` until it ends or another one goes ahead. Raises where members may be out of step."""
        if not job.met:
            if (merging := job.merging) is not None:  # beside training; and before any time-out starts
                job.merging, lane = None, lane_of(self._device)
                try:
                    with lane.queue() if lane is not None else nullcontext():
                        self._pack(job, lambda _: merging)
                except Exception:  # fault boundary: the other ranks wait for this one, whose failure ends the publish
                    log.exception("merging of %s", job.ref)
            self._agree(None)  # the main threads of the ranks start it at different times: no budget bounds that
            job.met = True
        job.budget.restart()
        results: list[Sent] | None = None
        while True:
            step = next_step(self._leader, self._exchange, job, results, self._jobs.after(job))
            results = None
            match step:
                case decisions.Fail(failure=failure, intact=intact):
                    if not intact:
                        raise failure.error()
                    return failure.error()
                case decisions.FinishPublish(report=report):
                    # The controller may be away for longer than other ranks would wait: they have received the step.
                    if self._leader is not None:
                        self._leader.conclude(report)
                    return report
                case decisions.Yield():
                    return step
                case decisions.Attempt() as attempt:
                    sent = msgspec.msgpack.encode(self._attempt(job, attempt))
                    gathered = self._exchange.all_gather_bytes(sent, job.budget.patience_s)
                    results = [msgspec.msgpack.decode(raw, type=Sent) for raw in gathered]

    def _attempt(self, job: PublishJob, attempt: decisions.Attempt) -> Sent:
        started = time.perf_counter()
        wire: Failure | None = None
        try:
            if attempt.groups:
                with job.budget.forming() as form_deadline:
                    self._form(job, attempt, form_deadline)
                started = time.perf_counter()
            deadline = min(time.monotonic() + self._config.attempt_s, job.budget.deadline)
            if self._leader is not None:
                self._leader.announce(job, deadline)
            if self._group is not None and job.shard.is_source:
                job.shard.send(self._group, deadline)
        except (PublishError, ManifestError) as e:
            # Without this member the receivers notice the failure at once instead of at their deadline.
            self._leave()
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

    def _form(self, job: PublishJob, attempt: decisions.Attempt, deadline: float) -> None:
        """Replace groups: sources listen for each, rank 0 invites their servers, all meet (collective).

        A source is a member of the group without a relay. Raises PublishError on all ranks if a member is not in time.
        """
        if any(group.relay is None for group in attempt.groups):
            self._leave()
        with ExitStack() as opened:
            listeners = list[GroupListener | None]()
            for group in attempt.groups:
                listeners.append(listener := self._listener(group, attempt, deadline))
                opened.callback(listener.close if listener else lambda: None)
            mine = msgspec.msgpack.encode([listener.endpoint if listener else None for listener in listeners])
            gathered = self._exchange.all_gather_bytes(mine, job.budget.patience_s)
            of_ranks = [msgspec.msgpack.decode(raw, type=list[SourceEndpoint | None]) for raw in gathered]
            if self._leader is not None:
                endpoints = [[e for e in of_group if e is not None] for of_group in zip(*of_ranks, strict=True)]
                self._leader.invite(attempt.groups, endpoints, deadline)
            failure: Failure | None = None
            try:
                for group, listener in zip(attempt.groups, listeners, strict=True):
                    if listener is not None and group.relay is None:
                        self._group = listener.accept(attempt.shared)
                if self._leader is not None:
                    self._leader.await_joins()
            except (PublishError, ManifestError) as e:
                failure = Failure.of(e)
            # No rank sends unless all have met: the version is announced only then.
            if (failed := self._agree(failure, job.budget.patience_s)) is not None:
                raise failed.error()
            opened.pop_all()
        for group, listener in zip(attempt.groups, listeners, strict=True):
            if group.relay is not None:
                if (replaced := self._stores.pop(group.relay.name, None)) is not None:
                    replaced.close()
                if listener is not None:
                    self._stores[group.relay.name] = listener

    def _listener(self, group: RelayGroup, attempt: decisions.Attempt, deadline: float) -> GroupListener | None:
        """The store of ``group``; None unless this rank is a source and the group has members."""
        if self._exchange.rank not in attempt.sources or not group.members:
            return None
        bucket = bucket_of(self._config.bucket_bytes, len(attempt.sources))
        return GroupListener(
            source=self._exchange.rank,
            bind=self._bind,
            receivers=[f"worker {w} of {s.name} ({s.host})" for s in group.members for w in range(s.workers)],
            backend=self._backend,
            timeout_s=deadline - time.monotonic(),
            bucket_bytes=bucket if attempt.shared else min(bucket, RELAYED_BYTES),
            secret=self._secret,
            device=self._device,
        )

    def _agree(self, failure: Failure | None, timeout_s: float | None = None) -> Failure | None:
        """Return the first rank's ``failure`` on every rank; None if no rank has one (collective)."""
        gathered = self._exchange.all_gather_bytes(msgspec.msgpack.encode(failure), timeout_s)
        failures = (msgspec.msgpack.decode(raw, type=Failure | None) for raw in gathered)
        return next((failed for failed in failures if failed is not None), None)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def next_step(
    leader: Leader | None, exchange: Exchange, job: PublishJob, results: Sequence[Sent] | None, next_turn: int | None
) -> decisions.Step:
    """Rank 0's next step (see `Leader.decide`), on every rank; its remaining time is that of ``job`` afterwards.

    Collective. Raises PublishError if another rank does not respond.
    """
    if leader is not None:
        step = leader.decide(job, results, next_turn)
        decision = decisions.Decision(step=step, left_s=job.budget.left_s, form_left_s=job.budget.form_left_s)
        exchange.broadcast_bytes(msgspec.msgpack.encode(decision), job.budget.patience_s)
        return step
    raw = exchange.broadcast_bytes(None, job.budget.patience_s)
    decision = msgspec.msgpack.decode(raw, type=decisions.Decision)
    job.budget.adopt(decision.left_s, decision.form_left_s)
    return decision.step

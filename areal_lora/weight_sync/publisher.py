"""Trainer side of a publish, one ``Publisher`` per trainer rank.

    main thread                                background thread
    pack into a flat buffer, hash
    exchange shards -> manifest
    start ------------------------------------> source: broadcast its shard
    train on ...                                rank 0: POST /admin/publish to all servers meanwhile
                                                rank 0: all acknowledged -> score the probe, compare
    join (the next publish does it) <---------- outcome, exchanged so that all ranks agree

``connect``, ``publish`` and ``PublishHandle.join`` are collective: every rank calls them in
the same order from its main thread, and all ranks raise the same error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import torch

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import ArealLoraError, ManifestError, ParityError, PublishError
from areal_lora.types import AdapterRef, AdapterSpec, ShardManifest
from areal_lora.weight_sync.buckets import PackBuffer
from areal_lora.weight_sync.digests import manifest_digest
from areal_lora.weight_sync.exchange import Exchange
from areal_lora.weight_sync.groups import BroadcastGroup, GroupListener
from areal_lora.weight_sync.manifest import Refusal, build_manifest, encode
from areal_lora.weight_sync.outcome import Failure, Outcome, Part, PublishReport, ServerAck
from areal_lora.weight_sync.probe import ProbeExpectation, ProbeResult, check_probe
from areal_lora.weight_sync.transport import AdminClient, JoinRequest, PublishReply, ServerEndpoint, SourceEndpoint

GRACE_S = 2.0  # servers get this much longer than the wire, so that their own diagnosis arrives first


class Publisher:
    """Publishes versions of one run's adapters to all servers.

    ``sources`` are the trainer ranks that own tensors; ``bind`` is this rank's own address,
    which the servers' workers must reach. ``backend`` names a ``groups`` backend. Rank 0 calls
    ``on_active(ref)`` from its background thread once all servers serve ``ref`` and the probe passed.
    """

    def __init__(
        self, *, run: str, sources: Sequence[int], rank: int, servers: Sequence[ServerEndpoint], secret: str,
        config: WeightSyncConfig, exchange: Exchange, bind: str = "127.0.0.1", backend: str = "gloo",
        on_active: Callable[[AdapterRef], None] | None = None,
    ) -> None:
        self._on_active = on_active
        self._run, self._rank, self._servers, self._config = run, rank, tuple(servers), config
        self._bind, self._backend, self._exchange = bind, backend, exchange
        self.sources = tuple(sources)
        self._is_source = rank in self.sources
        self._clients = [AdminClient(s, secret) for s in self._servers]
        self._buffer = PackBuffer(rank, config.wire_dtype)
        self._group: BroadcastGroup | None = None
        self._connected = False
        self._previous: PublishHandle | None = None
        self._base_logprobs: dict[tuple[str, str], list[list[float]]] = {}

    def connect(self) -> None:
        """Make the groups anew: sources listen, rank 0 tells every server, all meet.

        Raises PublishError on every rank if a server or worker does not come in time.
        """
        self.close()
        timeout_s = self._config.deadline_s
        world = 1 + sum(s.workers for s in self._servers)
        listener = None
        if self._is_source:
            listener = GroupListener(
                source=self._rank, bind=self._bind, world=world, backend=self._backend, timeout_s=timeout_s,
                bucket_bytes=int(self._config.bucket_mib * 2**20),
            )
        gathered = self._exchange.all_gather_bytes(msgspec.msgpack.encode(listener and listener.endpoint))
        endpoints = [e for raw in gathered if (e := msgspec.msgpack.decode(raw, type=SourceEndpoint | None))]
        failure: Failure | None = None
        with ThreadPoolExecutor(max(1, len(self._clients)), thread_name_prefix="admin-join") as pool:
            joins = [
                pool.submit(client.join, request, timeout_s + GRACE_S)
                for client, request in zip(self._clients, self._join_requests(endpoints, timeout_s), strict=True)
            ] if self._rank == 0 else []
            try:
                if listener is not None:
                    self._group = listener.accept()
            except PublishError as e:
                failure = Failure.of(e)
            for join in joins:
                try:
                    join.result()
                except (PublishError, ManifestError) as e:
                    failure = Failure.of(e)  # a server's own words say more than the source's time-out
        self._agree(Outcome(failure=failure))
        self._connected = True

    def publish(
        self, ref: AdapterRef, parent: AdapterRef | None, spec: AdapterSpec,
        owned: Sequence[tuple[str, torch.Tensor]], aliases: Mapping[str, str], base_digest: str,
        probe: ProbeExpectation | None,
    ) -> PublishHandle:
        """Start publishing ``ref``; the tensors are copied before this returns.

        ``owned`` are this rank's unique tensors (wire name, [r, in] or [out, r]), ``aliases``
        this rank's further names for them. Only rank 0's ``probe`` is used. Joins the publish
        before first, if nobody did. Raises ManifestError if the ranks' parts do not fit
        together, or what the publish before ended with.
        """
        if self._previous is not None and not self._previous.joined:
            self._previous.join()
        if not self._connected:
            self.connect()
        started = time.perf_counter()
        part = self._pack(ref, owned, aliases)
        raw = self._exchange.all_gather_bytes(msgspec.msgpack.encode(part))
        parts = [msgspec.msgpack.decode(r, type=Part) for r in raw]
        manifest = self._manifest(ref, parent, spec, base_digest, parts)
        phases = {"pack": max(p.pack_ms for p in parts)}
        phases["manifest"] = (time.perf_counter() - started) * 1e3 - part.pack_ms
        self._previous = PublishHandle(self, manifest, probe, phases)
        return self._previous

    def close(self) -> None:
        """Leave the group of this rank, if it is a source."""
        if self._group is not None:
            self._group.close()
        self._group, self._connected = None, False

    def _join_requests(self, endpoints: list[SourceEndpoint], timeout_s: float) -> list[JoinRequest]:
        requests, first = [], 1
        for server in self._servers:
            ranks = list(range(first, first + server.workers))
            requests.append(JoinRequest(run=self._run, endpoints=endpoints, ranks=ranks, timeout_s=timeout_s))
            first += server.workers
        return requests

    def _pack(self, ref: AdapterRef, owned: Sequence[tuple[str, torch.Tensor]], aliases: Mapping[str, str]) -> Part:
        started = time.perf_counter()
        part = Part(ref=ref, shard=None, aliases=dict(aliases), pack_ms=0.0)
        try:
            if self._is_source:
                part.shard = self._buffer.pack(owned)
            elif owned:
                raise PublishError(f"trainer rank {self._rank} owns {owned[0][0]} but is not among the sources")
        except ArealLoraError as e:
            part.failure = Failure.of(e)
        part.pack_ms = (time.perf_counter() - started) * 1e3
        return part

    def _manifest(
        self, ref: AdapterRef, parent: AdapterRef | None, spec: AdapterSpec, base_digest: str, parts: list[Part]
    ) -> ShardManifest:
        """The same on every rank, or the same error."""
        aliases: dict[str, str] = {}
        for rank, part in enumerate(parts):
            if part.failure is not None:
                raise part.failure.error()
            if part.ref != parts[0].ref:
                raise PublishError(f"trainer rank {rank} publishes {part.ref} while rank 0 publishes {parts[0].ref}")
            for name, target in part.aliases.items():
                if aliases.setdefault(name, target) != target:
                    raise ManifestError(Refusal.DUPLICATE, f"{name} is an alias of {aliases[name]} and of {target}")
        return build_manifest(
            run=self._run, ref=ref, parent=parent, spec=spec, base_digest=base_digest, aliases=aliases,
            shards=[p.shard for p in parts if p.shard is not None],
        )

    def run(self, manifest: ShardManifest, probe: ProbeExpectation | None) -> Outcome:
        """The background part of this rank; called by ``PublishHandle`` from its thread."""
        started = time.perf_counter()
        outcome = Outcome()
        try:
            with ThreadPoolExecutor(max(1, len(self._clients)), thread_name_prefix="admin-publish") as pool:
                posts = self._post(manifest, pool) if self._rank == 0 else []
                lost = self._send()
                outcome.send_ms = (time.perf_counter() - started) * 1e3
                replies = self._acknowledged(manifest, posts)
            if lost is not None:
                raise lost
            if self._rank == 0:
                outcome.report = self._report(manifest, replies, probe, started)
                if self._on_active is not None:
                    self._on_active(manifest.ref)
        except ArealLoraError as e:
            outcome.failure = Failure.of(e)
        return outcome

    def _post(self, manifest: ShardManifest, pool: ThreadPoolExecutor) -> list[Future[PublishReply]]:
        body, timeout_s = encode(manifest), self._config.deadline_s + GRACE_S
        return [pool.submit(client.publish, body, timeout_s) for client in self._clients]

    def _send(self) -> PublishError | None:
        """Broadcast this rank's shard. A failure is returned: the servers' answers may tell its cause."""
        if self._group is None:
            return None
        try:
            self._group.start(self._buffer.flat, time.monotonic() + self._config.deadline_s).wait()
        except PublishError as e:
            return e
        return None

    def _acknowledged(self, manifest: ShardManifest, posts: list[Future[PublishReply]]) -> list[PublishReply]:
        """Every server's answer; raises the most telling failure after all have answered."""
        want = manifest_digest(manifest)
        replies: list[PublishReply] = []
        failures: list[ArealLoraError] = []
        for client, post in zip(self._clients, posts):
            try:
                reply = post.result()
                if (reply.ref, reply.digest) != (str(manifest.ref), want):
                    raise PublishError(
                        f"server {client.server} acknowledged {reply.ref} {reply.digest}, published was "
                        f"{manifest.ref} {want}; it serves other numbers than were sent"
                    )
                replies.append(reply)
            except (ManifestError, PublishError) as e:
                failures.append(e)
        refused = [f for f in failures if isinstance(f, ManifestError) and f.reason != Refusal.WIRE]
        if refused:
            raise refused[0]
        if failures:
            # A server that did not answer is the cause; that others missed the transfer is its effect.
            failures.sort(key=lambda f: isinstance(f, ManifestError))
            raise PublishError(f"{manifest.ref}: " + "; ".join(str(f) for f in failures))
        return replies

    def _report(
        self, manifest: ShardManifest, replies: list[PublishReply], probe: ProbeExpectation | None, started: float
    ) -> PublishReport:
        acked = time.perf_counter()
        deadline = time.monotonic() + self._config.deadline_s
        probes = [self._probe(manifest.ref, client, probe, deadline) if probe else None for client in self._clients]
        phases = {name: max(r.phases.get(name, 0.0) for r in replies) for r in replies for name in r.phases}
        phases["ack"] = (acked - started) * 1e3
        phases["probe"] = (time.perf_counter() - acked) * 1e3
        acks = [
            ServerAck(
                server=str(s), digest=r.digest, phases=r.phases,
                probe_mean_abs=p.mean_abs if p else None, probe_max_abs=p.max_abs if p else None,
            )
            for s, r, p in zip(self._servers, replies, probes, strict=True)
        ]
        done = [p for p in probes if p is not None]
        return PublishReport(
            ref=manifest.ref, digest=manifest_digest(manifest), nbytes=manifest.nbytes, phases=phases, acks=acks,
            probe_mean_abs=max((p.mean_abs for p in done), default=None),
            probe_max_abs=max((p.max_abs for p in done), default=None),
        )

    def _probe(self, ref: AdapterRef, client: AdminClient, probe: ProbeExpectation, deadline: float) -> ProbeResult:
        def score(model: str | None) -> list[list[float]]:
            return client.score(model, probe.token_ids, max(deadline - time.monotonic(), GRACE_S))

        server = str(client.server)
        key = (server, repr(probe.token_ids))
        if key not in self._base_logprobs:
            self._base_logprobs[key] = score(None)
        served = score(str(ref))
        return check_probe(ref, server, probe, served, self._base_logprobs[key], self._config.probe_tolerance)

    def _agree(self, mine: Outcome) -> tuple[float, PublishReport | None]:
        """Exchange outcomes; (slowest send in ms, report), or the same error on every rank."""
        raw = self._exchange.all_gather_bytes(msgspec.msgpack.encode(mine))
        outcomes = [msgspec.msgpack.decode(r, type=Outcome) for r in raw]
        failures = [o.failure for o in outcomes if o.failure is not None]
        if failures:
            self.close()  # members may be out of step; the next publish connects anew
            raise next((f for f in failures if f.kind != "failed"), failures[0]).error()
        return max(o.send_ms for o in outcomes), outcomes[0].report


class PublishHandle:
    """A publish under way. ``join`` is collective and may be called again: it repeats its answer."""

    def __init__(
        self, publisher: Publisher, manifest: ShardManifest, probe: ProbeExpectation | None, phases: dict[str, float]
    ) -> None:
        self.ref = manifest.ref
        self._publisher, self._phases = publisher, phases
        self._outcome = Outcome(failure=Failure(kind="failed", message=f"{self.ref}: publish thread ended early"))
        self._answer: PublishReport | ArealLoraError | None = None
        self._thread = threading.Thread(
            target=self._run, args=(manifest, probe), name=f"publish-{self.ref}", daemon=True
        )
        self._thread.start()

    @property
    def joined(self) -> bool:
        """Whether ``join`` has told the outcome."""
        return self._answer is not None

    def done(self) -> bool:
        """Whether this rank's part has ended (``join`` would not wait for it)."""
        return not self._thread.is_alive()

    def join(self) -> PublishReport:
        """Wait for every server's acknowledgement and the probe.

        Bounded by the configured deadline (transfer and acknowledgement) and again by it (all
        scoring), so an ``Exchange`` must wait three of them. Raises ManifestError (refused),
        PublishError (deadline, dead peer) or ParityError, the same on all ranks.
        """
        if self._answer is None:
            self._thread.join()
            try:
                send_ms, report = self._publisher._agree(self._outcome)
                if report is None:
                    raise PublishError(f"{self.ref}: trainer rank 0 gave no report")
                phases = self._phases | {"send": send_ms} | report.phases
                self._answer = msgspec.structs.replace(report, phases=phases)
            except (ManifestError, PublishError, ParityError) as e:
                self._answer = e
        if isinstance(self._answer, ArealLoraError):
            raise self._answer
        return self._answer

    def _run(self, manifest: ShardManifest, probe: ProbeExpectation | None) -> None:
        self._outcome = self._publisher.run(manifest, probe)

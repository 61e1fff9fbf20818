"""Rank 0's part of a publish: whom to send to, what their answers mean, what happens next.

Called by rank 0's publisher thread only. Every decision becomes a ``Step`` for all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import ArealLoraError, ManifestError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.messages import JoinReply, PublishReply, ServerEndpoint, SourceEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation, ProbeResult
from areal_lora.weight_sync.refusal import Refusal
from areal_lora.weight_sync.seal import adapter_digest
from areal_lora.weight_sync.trainer.fleet import Fleet, answers, errors
from areal_lora.weight_sync.trainer.membership import (
    Judgement,
    Membership,
    ServerFinding,
    ServerWatch,
    ServerWatcher,
    judge,
)
from areal_lora.weight_sync.trainer.steps import Failure, PublishReport, Sent, ServerAck, Step

WAIT_S = 0.1  # between looks for a server to go on with
WAIT_STEP_S = 1.0  # other trainer ranks hear from this one so often

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """``ref`` serves, and passed its probe, on ``servers`` and nowhere else; ``lost`` were given up since the last."""

    ref: AdapterRef
    servers: tuple[ServerEndpoint, ...]
    lost: tuple[str, ...]


class Publish(Protocol):
    """What the coordinator needs to know of a publish; times are ``time.monotonic``."""

    manifest: ShardManifest
    layout: AdapterLayout
    probe: ProbeExpectation | None
    began_s: float
    deadline: float
    gate_ms: float

    @property
    def ref(self) -> AdapterRef: ...


class Coordinator:
    """``servers`` are those to begin with; ``watch``, if given, is where restarted and further ones appear.

    ``on_active`` is called in the publisher thread, before ``PublishHandle.join`` returns.
    """

    def __init__(
        self,
        *,
        run: str,
        secret: str,
        servers: Iterable[ServerEndpoint],
        config: WeightSyncConfig,
        watch: ServerWatch | None = None,
        on_active: Callable[[Active], None] | None = None,
    ) -> None:
        self._config, self._on_active = config, on_active
        self._fleet = Fleet(run, secret)
        self._membership = Membership(servers)
        self._watcher: ServerWatcher | None = None
        if watch is not None:
            self._watcher = ServerWatcher(watch, self._membership, self._answers_ping)
        self._sources: set[int] | None = None  # of the groups that stand; None: connect anew
        self._newcomers: set[ServerEndpoint] = set()
        self._posts: dict[ServerEndpoint, Future[PublishReply]] = {}
        self._joins: dict[ServerEndpoint, Future[JoinReply]] = {}
        self._answered_by = 0.0  # when the last of these has come, or is not waited for any more; time.monotonic
        self._attempts = 0
        self._waiting_since: float | None = None
        self._full_since: float | None = None  # a member has no free adapter slot
        self._lost: dict[str, str] = {}  # since the last version that was announced
        self._published: set[str] = set()  # adapters of which a version of this trainer serves

    def changed(self) -> bool:
        """Whether servers are there that are not members yet, or members do not answer; callable from any thread."""
        if self._watcher is None:
            return False
        return any(map(self._membership.wants, self._watcher.newcomers())) or not self._watcher.all_answer()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        self._fleet.close()

    # ------------------------------------------------------------ steps

    def open(self, job: Publish) -> Step:
        """How a publish begins. Where nothing has changed the servers are told of it right here."""
        self._attempts, self._newcomers, self._waiting_since, self._full_since = 1, set(), None, None
        members = self._membership.members
        same = self._sources == _sources(job.layout) and not self.changed()
        if same and members and self._fleet.checked(members, job.layout):
            self.announce(job, min(time.monotonic() + self._config.attempt_s, job.deadline))
            return Step()
        return self._guarded(self._connect, job)

    def next_step(self, job: Publish, parts: Sequence[Sent]) -> Step:
        """What follows an attempt, given how it went at every rank."""
        return self._guarded(self._follow, job, parts)

    def go_on(self, job: Publish) -> Step:
        """What follows a step that told all ranks to wait."""
        return self._guarded(self._connect, job)

    def ended(self, job: Publish) -> None:
        """``job`` serves, and all ranks know. May take as long as ``on_active`` does, which no deadline bounds."""
        if self._on_active is not None:
            self._on_active(Active(ref=job.ref, servers=self._membership.members, lost=tuple(self._lost)))
        self._lost = {}

    def announce(self, job: Publish, deadline: float) -> None:
        """Post the version to all members."""
        answer_s = self._config.answer_s
        self._posts = self._fleet.publish(self._membership.members, job.manifest, job.layout, deadline, answer_s)
        self._answered_by = deadline + answer_s

    def join(self, members: Sequence[ServerEndpoint], sources: list[SourceEndpoint], deadline: float) -> None:
        """Ask every member into the sources' groups; ``joined`` waits for them."""
        self._joins = self._fleet.join(members, sources, deadline, self._config.answer_s)
        self._answered_by = deadline + self._config.answer_s

    def joined(self) -> None:
        """Raises PublishError for a server that did not come."""
        for answer in answers(self._joins, self._answered_by).values():
            if isinstance(answer, ArealLoraError):
                raise answer

    def _guarded(self, decide: Callable[..., Step], *args: object) -> Step:
        try:
            return decide(*args)
        except ArealLoraError as e:
            self._sources = None
            return Step(failure=Failure.of(e))

    def _connect(self, job: Publish) -> Step:
        """Make an attempt with whoever answers, or wait a while for a server to come (back) if too few are left."""
        now = time.monotonic()
        until = min(now + WAIT_STEP_S, job.deadline)
        while True:
            plan = self._able(job, self._candidates())
            if len(plan) >= self._config.min_servers:
                self._sources, self._posts, self._joins, self._waiting_since = _sources(job.layout), {}, {}, None
                return Step(connect=list(plan))
            if self._waiting_since is None:
                self._waiting_since = now
                log.warning("%s; waiting up to %g s", self._too_few(job, plan), self._config.rejoin_s)
            if self._watcher is None or time.monotonic() >= self._waiting_since + self._config.rejoin_s:
                raise PublishError(self._too_few(job, plan))
            if time.monotonic() >= until:
                return Step(wait=True)
            time.sleep(WAIT_S)

    def _able(self, job: Publish, plan: tuple[ServerEndpoint, ...]) -> tuple[ServerEndpoint, ...]:
        """Those of ``plan`` that answer, as the new members. Raises AdapterError if an old one cannot serve this."""
        timeout_s, before = self._config.ping_s, set(self._membership.members)
        self._newcomers |= set(plan) - before
        for server in before - set(plan):
            log.error("rollout server %s is given up: it was started again", server)
            self._lost[server.name] = "was started again"
        self._membership.admit(plan)
        self._fleet.keep(plan)
        self._weed_out(self._fleet.silent(plan, timeout_s))
        checks = self._fleet.check(self._membership.members, job.layout, timeout_s)
        self._weed_out(errors(answers(checks, time.monotonic() + timeout_s)))
        return self._membership.members

    def _weed_out(self, failed: Mapping[ServerEndpoint, ArealLoraError]) -> None:
        """Give up members that failed outside of a transfer. Raises the error of one that speaks of the version."""
        findings = [
            ServerFinding(server=s, error=failed.get(s), alive=False, newcomer=s in self._newcomers)
            for s in self._membership.members
        ]
        self._give_up(judge(findings, retried=False).lost)

    def _follow(self, job: Publish, parts: Sequence[Sent]) -> Step:
        _check_parts(job, parts)
        findings = self._findings(job, parts)
        full = any(f.full for f in findings)
        judgement = judge(findings, retried=self._attempts > 1, late=self._waited_for_slots(full))
        if any(f.error for f in findings) or any(p.wire for p in parts):
            self._sources = None  # members may be out of step
        self._fleet.end([f.server for f in findings if f.leftover], self._config.ping_s)
        self._give_up(judgement.lost)
        acked_s = time.monotonic()
        probes: dict[ServerEndpoint, ProbeResult] = {}
        if judgement.complete:
            probes = self._probed(job, judgement)
        if not judgement.complete or len(self._membership.members) < self._config.min_servers:
            if full:
                return self._wait_for_slots(job, findings, judgement)
            if job.deadline - time.monotonic() < self._config.ping_s:  # too little for another transfer
                within = f"{job.ref} did not reach all servers within {self._config.deadline_s:g} s"
                raise PublishError(f"{within}: {_errors(findings, parts)}")
            log.warning("%s is sent again: %s", job.ref, _errors(findings, parts))
            self._attempts += 1
            return self._connect(job)
        self._membership.succeeded()
        self._published.add(job.ref.name)
        report = self._report(job, parts, probes, acked_s)
        return Step(report=report)

    def _waited_for_slots(self, full: bool) -> bool:
        """Whether members have been ``full`` for a whole publish's deadline."""
        if not full:
            self._full_since = None
            return False
        self._full_since = self._full_since or time.monotonic()
        return time.monotonic() >= self._full_since + self._config.deadline_s

    def _wait_for_slots(self, job: Publish, findings: Sequence[ServerFinding], judgement: Judgement) -> Step:
        """Requests that run hold their versions' slots until they end: the deadline begins anew, and all try again."""
        if any(f.full and f.server in judgement.lost for f in findings):
            self._full_since = None  # a server that comes back is waited for as long
        if any(f.error is not None and not f.full for f in findings):
            self._attempts += 1
        held = "; ".join(f"{f.server.name}: {f.error}" for f in findings if f.full)
        log.warning("%s waits for an adapter slot: %s", job.ref, held)
        time.sleep(WAIT_S)
        return Step(wait=True)

    # ------------------------------------------------------------ what the servers did

    def _candidates(self) -> tuple[ServerEndpoint, ...]:
        return self._membership.with_newcomers(self._watcher.newcomers() if self._watcher else ())

    def _answers_ping(self, server: ServerEndpoint) -> bool:
        try:
            self._fleet.ping(server, self._config.ping_s)
        except ArealLoraError:
            return False
        return True

    def _give_up(self, lost: Mapping[ServerEndpoint, str]) -> None:
        if not lost:
            return
        for server, reason in lost.items():
            log.error("rollout server %s is given up: it %s", server, reason)
            self._lost[server.name] = reason
        self._membership.lose(lost)
        self._fleet.keep(self._membership.members)
        self._sources = None

    def _findings(self, job: Publish, parts: Sequence[Sent]) -> list[ServerFinding]:
        """How every member fared. Waits for all answers, for as long as they may take."""
        self._digest = adapter_digest(job.layout, (part.sum for part in parts))
        self._replies = answers(self._posts, self._answered_by)
        failed = errors(self._replies) if self._posts else errors(answers(self._joins, self._answered_by))
        foreign = {s for s, e in failed.items() if isinstance(e, ManifestError) and e.reason == Refusal.STALE_VERSION}
        for server in self._membership.members:
            reply = self._replies.get(server)
            if isinstance(reply, PublishReply) and (reply.ref, reply.digest) != (str(job.ref), self._digest):
                failed[server] = ManifestError(
                    Refusal.HASH,
                    f"server {server} acknowledged {reply.ref} {reply.digest}, published was {job.ref} {self._digest}; "
                    "it serves other numbers than were sent",
                )
                foreign.add(server)
            elif reply is None and server not in failed:
                failed[server] = PublishError(f"{job.ref} was not sent: {_errors((), parts)}")
        silent = self._fleet.silent(tuple(failed), self._config.ping_s)
        first = job.ref.name not in self._published
        return [
            ServerFinding(
                server=s,
                error=failed.get(s),
                alive=s not in silent,
                newcomer=s in self._newcomers,
                leftover=s in foreign and (first or s in self._newcomers),
            )
            for s in self._membership.members
        ]

    def _probed(self, job: Publish, judgement: Judgement) -> dict[ServerEndpoint, ProbeResult]:
        """Score the probe on all that acknowledged; who cannot answer is given up. Raises a member's ParityError."""
        if job.probe is None:
            return {}
        deadline = max(job.deadline, time.monotonic() + self._config.ping_s)
        posts = self._fleet.probe(judgement.keep, job.ref, job.probe, self._config.probe_tolerance, deadline)
        results = answers(posts, deadline)
        self._weed_out(errors(results))
        return {s: r for s, r in results.items() if isinstance(r, ProbeResult)}

    def _report(
        self, job: Publish, parts: Sequence[Sent], probes: Mapping[ServerEndpoint, ProbeResult], acked_s: float
    ) -> PublishReport:
        replies = {s: r for s in self._membership.members if isinstance(r := self._replies[s], PublishReply)}
        names = {name for r in replies.values() for name in r.phases}
        phases = {name: max(r.phases.get(name, 0.0) for r in replies.values()) for name in names}
        phases |= {
            "pack": max(p.pack_ms for p in parts),
            "send": max(p.send_ms for p in parts),
            "ack": (acked_s - job.began_s) * 1e3,
            "probe": (time.monotonic() - acked_s) * 1e3,
            "gate": job.gate_ms,
        }
        acks = []
        for server, reply in replies.items():
            ack = ServerAck(server=server, digest=reply.digest, phases=reply.phases)
            if (p := probes.get(server)) is not None:
                ack = ServerAck(
                    server=server,
                    digest=reply.digest,
                    phases=reply.phases,
                    probe_mean_abs=p.mean_abs,
                    probe_max_abs=p.max_abs,
                    differs=p.differs,
                )
            acks.append(ack)
        return PublishReport(
            ref=job.ref,
            digest=self._digest,
            nbytes=job.layout.nbytes,
            phases=phases,
            acks=acks,
            lost=dict(self._lost),
            attempts=self._attempts,
            probe_mean_abs=max((p.mean_abs for p in probes.values()), default=None),
            probe_max_abs=max((p.max_abs for p in probes.values()), default=None),
            differs=all(p.differs for p in probes.values()) if probes else None,
        )

    def _too_few(self, job: Publish, plan: Sequence[ServerEndpoint]) -> str:
        lost = "; ".join(f"{name} {reason}" for name, reason in self._lost.items()) or "none was lost in this publish"
        return (
            f"{job.ref}: {len(plan)} rollout servers are left, weight_sync.min_servers is {self._config.min_servers} "
            f"({lost}); see the servers' logs"
        )


def _sources(layout: AdapterLayout) -> set[int]:
    return {shard.source for shard in layout.shards}


def _check_parts(job: Publish, parts: Sequence[Sent]) -> None:
    """Whether all ranks speak of the same publish and have packed it; what else they say can be mended."""
    for rank, part in enumerate(parts):
        if part.own is not None:
            raise part.own.error()
        if (part.ref, part.layout) != (job.ref, job.layout.digest):
            raise PublishError(
                f"trainer rank {rank} publishes {part.ref} with layout {part.layout} while rank 0 publishes {job.ref} "
                f"with {job.layout.digest}"
            )
        if part.wire is not None and part.wire.kind != "failed":
            raise part.wire.error()


def _errors(findings: Sequence[ServerFinding], parts: Sequence[Sent]) -> str:
    """What went wrong, for people; what the trainer's side of a transfer saw only if no server says more."""
    said = [f"{f.server.name}: {f.error}" for f in findings if f.error is not None]
    ranks = [f"trainer rank {rank}: {p.wire.message}" for rank, p in enumerate(parts) if p.wire is not None]
    return "; ".join(said or ranks)

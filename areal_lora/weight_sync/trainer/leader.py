"""Role of rank 0 in a publish: request, collect the answers, decide (``decisions``), share the next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from areal_lora.config.models import WeightSyncConfig
from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import ArealLoraError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply, ServerEndpoint, SourceEndpoint
from areal_lora.weight_sync.probe import ProbeResult
from areal_lora.weight_sync.seal import adapter_digest
from areal_lora.weight_sync.trainer.decisions import (
    Look,
    Move,
    Progress,
    after_attempt,
    after_look,
    check_results,
    judged,
    member_faults,
    what_failed,
)
from areal_lora.weight_sync.trainer.fleet import AttemptRequests, Fleet, answers, errors
from areal_lora.weight_sync.trainer.job import Job
from areal_lora.weight_sync.trainer.membership import ServerFinding, ServerWatch
from areal_lora.weight_sync.trainer.report import PublishReport, server_acks, slowest_phases
from areal_lora.weight_sync.trainer.role import Attempted, Begun, Event, Waited
from areal_lora.weight_sync.trainer.roster import Roster
from areal_lora.weight_sync.trainer.steps import Attempt, Decision, Fail, Failure, Finish, Sent, Step, Wait

PAUSE_S = 0.1  # between two looks for servers or slots
WAIT_STEP_S = 1.0  # the longest time without a step for the other ranks

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """``ref`` serves, and passed its probe, on exactly ``servers``; ``lost`` were excluded since the last version."""

    ref: AdapterRef
    servers: tuple[ServerEndpoint, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """Members and source ranks of the groups that are formed."""

    members: tuple[ServerEndpoint, ...]
    sources: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Result of an attempt: digest of the adapter, answers of the servers, a finding per member."""

    digest: str
    replies: dict[ServerEndpoint, PublishReply]
    findings: list[ServerFinding]


class Leader:
    """``servers`` are the first members; ``watch``, if given, shows restarted and further servers.

    ``on_active`` is called in the publisher thread, before ``PublishHandle.wait`` returns.
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
        self.roster = Roster(self._fleet, servers, ping_s=config.ping_s, watch=watch)
        self._requests = AttemptRequests(self._fleet, config.answer_s)
        self._formed: Formation | None = None  # None: members may be out of step, form new groups
        self._progress = Progress()
        self._published: set[str] = set()  # adapters of which a version of this trainer serves

    def changed(self) -> bool:
        return self.roster.changed()

    def close(self) -> None:
        self.roster.close()
        self._fleet.close()

    # ------------------------------------------------------------ requests

    def invite(self, members: Sequence[ServerEndpoint], sources: list[SourceEndpoint], deadline: float) -> None:
        self._requests.join(members, sources, deadline)

    def await_joins(self) -> None:
        self._requests.await_joins()

    def announce(self, job: Job, deadline: float) -> None:
        self._requests.publish(self.roster.members, job.manifest, job.layout, deadline, job.announce_pace())

    def hurry(self, ref: AdapterRef) -> None:
        self._fleet.hurry(self.roster.members, ref, self._config.ping_s)

    def conclude(self, job: Job) -> None:
        """May take as long as ``on_active`` does, which no deadline bounds."""
        if self._on_active is not None:
            self._on_active(Active(ref=job.ref, servers=self.roster.members, lost=tuple(self.roster.lost)))
        self.roster.lost.clear()

    # ------------------------------------------------------------ steps

    def decide(self, job: Job, event: Event, exchange: Exchange) -> Step:
        try:
            step = self._next(job, event)
        except ArealLoraError as e:
            self._formed = None
            step = Fail(failure=Failure.of(e))
        if isinstance(step, Wait):
            job.budget.restart()
        decision = Decision(step=step, left_s=job.budget.left_s)
        exchange.broadcast_bytes(msgspec.msgpack.encode(decision), job.budget.patience_s)
        return step

    def _next(self, job: Job, event: Event) -> Step:
        match event:
            case Begun():
                return self._begin(job)
            case Waited():
                return self._connect(job)
            case Attempted(results=results):
                return self._follow(job, results)

    def _begin(self, job: Job) -> Step:
        """Use the groups that are formed where nothing has changed."""
        self._progress, self.roster.newcomers = Progress(), set()
        members = self.roster.members
        same = self._formed == _formation(members, job) and not self.changed()
        if same and members and self._fleet.checked(members, job.layout):
            self._requests.clear()
            return Attempt()
        return self._connect(job)

    def _connect(self, job: Job) -> Step:
        """Attempt with all servers that answer; wait for a server to return if too few remain."""
        began = time.monotonic()
        until = min(began + WAIT_STEP_S, job.budget.deadline)
        while True:
            members = self.roster.admit(job.layout)
            newly_short = self._progress.short_since is None
            self._progress, look = after_look(
                self._progress,
                len(members),
                began=began,
                now=time.monotonic(),
                until=until,
                config=self._config,
                watched=self.roster.watched,
            )
            if look is Look.CONNECT:
                self._formed = _formation(members, job)
                self._requests.clear()
                return Attempt(members=list(members))
            if newly_short:
                log.warning(
                    "%s: %s; waiting up to %g s",
                    job.ref,
                    self.roster.shortage(self._config.min_servers),
                    self._config.rejoin_s,
                )
            if look is Look.STOP:
                raise PublishError(f"{job.ref}: {self.roster.shortage(self._config.min_servers)}")
            if look is Look.WAIT:
                return Wait()
            time.sleep(PAUSE_S)

    def _follow(self, job: Job, results: Sequence[Sent]) -> Step:
        """Judge an attempt by the results of the ranks and the answers of the servers."""
        check_results(job.ref, job.layout.digest, results)
        evidence = self._collect(job, results)
        findings = evidence.findings
        self._progress, judgement = judged(
            self._progress, findings, now=time.monotonic(), timeout_s=self._config.timeout_s
        )
        if any(f.error for f in findings) or any(sent.wire for sent in results):
            self._formed = None
        self._fleet.end([f.server for f in findings if f.leftover], self._config.ping_s)
        self.roster.exclude(judgement.lost)
        acked_s = time.monotonic()
        probes = self._probe(job, judgement.keep) if judgement.complete else {}
        self._progress, move = after_attempt(
            self._progress,
            findings,
            judgement,
            remaining=len(self.roster.members),
            left_s=job.budget.deadline - time.monotonic(),
            config=self._config,
        )
        match move:
            case Move.FINISH:
                self.roster.served()
                self._published.add(job.ref.name)
                return Finish(report=self._report(job, results, evidence, probes, acked_s))
            case Move.AWAIT_SLOT:
                held = "; ".join(f"{f.server.name}: {f.error}" for f in findings if f.full)
                log.warning("%s waits for an adapter slot: %s", job.ref, held)
                time.sleep(PAUSE_S)
                return Wait()
            case Move.RETRY:
                log.warning("%s is sent again: %s", job.ref, what_failed(findings, results))
                return self._connect(job)
            case Move.STOP:
                within = f"{job.ref} did not reach all servers within {self._config.timeout_s:g} s"
                raise PublishError(f"{within}: {what_failed(findings, results)}")

    # ------------------------------------------------------------ answers

    def _collect(self, job: Job, results: Sequence[Sent]) -> Evidence:
        """Wait for all answers up to their deadline, then ping the members that failed."""
        digest, members = adapter_digest(job.layout, (sent.sum for sent in results)), self.roster.members
        replies, failed = self._requests.answers()
        faults = member_faults(members, replies, failed, ref=job.ref, digest=digest, results=results)
        silent = self._fleet.silent(tuple(faults), self._config.ping_s)
        first = job.ref.name not in self._published
        findings = []
        for server in members:
            fault, newcomer = faults.get(server), server in self.roster.newcomers
            findings.append(
                ServerFinding(
                    server=server,
                    error=fault.error if fault else None,
                    alive=server not in silent,
                    newcomer=newcomer,
                    leftover=fault is not None and fault.foreign and (first or newcomer),
                )
            )
        return Evidence(digest=digest, replies=replies, findings=findings)

    def _probe(self, job: Job, servers: Sequence[ServerEndpoint]) -> dict[ServerEndpoint, ProbeResult]:
        """Score the probe on ``servers``; exclude those that do not answer. Raises a member's ParityError."""
        if job.probe is None:
            return {}
        deadline = max(job.budget.deadline, time.monotonic() + self._config.ping_s)
        posts = self._fleet.probe(servers, job.ref, job.probe, self._config.probe_tolerance, deadline)
        results = answers(posts, deadline)
        self.roster.exclude_failed(errors(results))
        return {s: r for s, r in results.items() if isinstance(r, ProbeResult)}

    def _report(
        self,
        job: Job,
        results: Sequence[Sent],
        evidence: Evidence,
        probes: Mapping[ServerEndpoint, ProbeResult],
        acked_s: float,
    ) -> PublishReport:
        replies = {server: evidence.replies[server] for server in self.roster.members}
        phases = slowest_phases(list(replies.values())) | {
            "pack": max(sent.pack_ms for sent in results),
            "send": max(sent.send_ms for sent in results),
            "ack": (acked_s - job.began_s) * 1e3,
            "probe": (time.monotonic() - acked_s) * 1e3,
            "gate": job.gate_ms,
        }
        return PublishReport(
            ref=job.ref,
            digest=evidence.digest,
            nbytes=job.layout.nbytes,
            phases=phases,
            acks=server_acks(replies, probes),
            lost=dict(self.roster.lost),
            attempts=self._progress.attempts,
            probe_mean_abs=max((p.mean_abs for p in probes.values()), default=None),
            probe_max_abs=max((p.max_abs for p in probes.values()), default=None),
            differs=all(p.differs for p in probes.values()) if probes else None,
        )


def _formation(members: tuple[ServerEndpoint, ...], job: Job) -> Formation:
    return Formation(members=members, sources=frozenset(shard.source for shard in job.layout.shards))

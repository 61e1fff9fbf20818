"""Role of rank 0 in a publish: request, collect the answers, decide (``decisions``), share the next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from areal_lora.algorithms.merging import MAX_LOST, CastSums
from areal_lora.config.models import WeightSyncConfig
from areal_lora.config.recorded import PROBE_TOLERANCES
from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, PublishError
from areal_lora.processes.startup import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import adapter_digest
from areal_lora.weight_sync.messages import PublishReply, ServerEndpoint, SourceEndpoint
from areal_lora.weight_sync.probe import ProbeResult
from areal_lora.weight_sync.refusal import RefusalReason
from areal_lora.weight_sync.trainer.decisions import (
    Attempt,
    Decision,
    Fail,
    Failure,
    FinishPublish,
    Look,
    Move,
    Sent,
    Step,
    Wait,
    Yield,
    after_attempt,
    after_look,
    check_results,
    judged,
    member_faults,
    sent_in_step,
    total_cast,
    what_failed,
)
from areal_lora.weight_sync.trainer.fleet import AttemptRequests, Fleet, answers, errors
from areal_lora.weight_sync.trainer.membership import MemberRoster, ServerFinding, ServerWatch
from areal_lora.weight_sync.trainer.publish_job import Job
from areal_lora.weight_sync.trainer.report import PublishReport, server_acks, slowest_phases
from areal_lora.weight_sync.trainer.role import AttemptOutcome, Event, StartOutcome, WaitOutcome

PAUSE_S = 0.1  # between two looks for servers or slots
WAIT_STEP_S = 1.0  # the longest time without a step for the other ranks

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """``ref`` serves, and passed its probe, on exactly ``servers``.

    Since the last version ``lost`` were excluded, and ``left`` have left in order: they still end what they run.
    """

    ref: AdapterRef
    servers: tuple[ServerEndpoint, ...]
    lost: tuple[str, ...]
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """The newest version of an adapter: the members that serve it, and the report of its publish."""

    members: frozenset[ServerEndpoint]
    report: PublishReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Result of an attempt: digest of the adapter, answers of the servers, a finding per member."""

    digest: str
    replies: dict[ServerEndpoint, PublishReply]
    findings: list[ServerFinding]


class Leader:
    """``servers`` are the first members; ``watch``, if given, shows restarted and further servers.

    ``on_active`` is called in the publisher thread, before ``PublishHandle.wait`` returns. ``on_wait`` is called there
    with the version that waits for an adapter slot and with what holds the slots, empty when it has one.
    ``loading`` names the servers that load their model; while there are any, a publish that has too few members waits.
    ``tolerance`` is that of ``check_probe``.
    """

    def __init__(
        self,
        *,
        run: str,
        secret: str,
        servers: Iterable[ServerEndpoint],
        config: WeightSyncConfig,
        tolerance: float = PROBE_TOLERANCES["float32"],
        min_servers: int = 1,
        watch: ServerWatch | None = None,
        on_active: Callable[[Active], None] | None = None,
        on_wait: Callable[[AdapterRef, str], None] | None = None,
        loading: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._config, self._tolerance, self._min_servers = config, tolerance, min_servers
        self._on_active, self._on_wait, self._loading = on_active, on_wait, loading
        self._awaited: Sequence[str] = ()  # servers that load their model, as logged
        self._fleet = Fleet(run, secret)
        self.roster = MemberRoster(self._fleet, servers, ping_s=config.ping_s, watch=watch)
        self._requests = AttemptRequests(self._fleet, config.answer_s)
        self._formed: tuple[ServerEndpoint, ...] | None = None  # None: members may be out of step, form new groups
        self._served: dict[str, ServedVersion] = {}  # by adapter
        self._next_turn: int | None = None

    def changed(self) -> bool:
        members = set(self.roster.members)
        return self.roster.changed() or any(not members <= served.members for served in list(self._served.values()))

    def close(self) -> None:
        self.roster.close()
        self._fleet.close()

    # ------------------------------------------------------------ requests

    def invite(self, members: Sequence[ServerEndpoint], sources: list[SourceEndpoint], deadline: float) -> None:
        self._requests.join(members, sources, deadline)

    def await_joins(self) -> None:
        self._requests.await_joins()

    def announce(self, job: Job, deadline: float) -> None:
        self._requests.publish(self.roster.members, job.manifest, job.layout, deadline)

    def drop(self, name: str) -> None:
        self._served.pop(name, None)
        self._fleet.drop(self.roster.members, name, self._config.attempt_s)

    def next_turn(self, number: int | None) -> None:
        self._next_turn = number

    def conclude(self, job: Job) -> None:
        """May take as long as ``on_active`` does, which no deadline bounds. Then servers that left may end."""
        roster = self.roster
        left = tuple(s.name for s in roster.left)
        if self._on_active is not None:
            self._on_active(Active(ref=job.ref, servers=roster.members, lost=tuple(roster.lost), left=left))
        self._fleet.dismiss(roster.left, self._config.ping_s)
        roster.lost.clear()
        roster.left.clear()

    # ------------------------------------------------------------ steps

    def decide(self, job: Job, event: Event, exchange: Exchange) -> Step:
        try:
            step = self._next(job, event)
        except ArealLoraError as e:
            step = Fail(failure=Failure.of(e), intact=self._formed is not None)
        if isinstance(step, Wait):
            job.budget.restart()
        decision = Decision(step=step, left_s=job.budget.left_s)
        exchange.broadcast_bytes(msgspec.msgpack.encode(decision), job.budget.patience_s)
        return step

    def _next(self, job: Job, event: Event) -> Step:
        match event:
            case StartOutcome():
                return self._start(job)
            case WaitOutcome():
                return self._connect(job)
            case AttemptOutcome(results=results):
                return self._follow(job, results)

    def _start(self, job: Job) -> Step:
        """Use the groups that are formed where nothing has changed."""
        self.roster.joining = set()
        members = self.roster.members
        if members and self._in_step(members) and not self.roster.changed():
            served = self._served.get(job.ref.name)
            if job.repeated and served is not None and served.report.ref == job.ref and served.members >= set(members):
                return FinishPublish(
                    report=msgspec.structs.replace(served.report, lost={}, joined=[], left=[], attempts=0)
                )
            if self._fleet.checked(members, job.layout):
                self._requests.clear()
                return Attempt()
        return self._connect(job)

    def _in_step(self, members: tuple[ServerEndpoint, ...]) -> bool:
        """Whether exactly ``members`` are in the groups, and all have taken part in the same broadcasts."""
        if self._formed != members:
            self._formed = None
        return self._formed is not None

    def _connect(self, job: Job) -> Step:
        """Attempt with all servers that answer; wait for a server to return if too few remain."""
        started = time.monotonic()
        until = min(started + WAIT_STEP_S, job.budget.deadline)
        while True:
            members = self._admit(job)
            newly_short = job.progress.short_since is None
            loading = self._loading() if len(members) < self._min_servers else ()
            if loading and loading != self._awaited:
                log.warning("%s: waits without limit for %s: loading the model", job.ref, ", ".join(loading))
            self._awaited = loading
            job.progress, look = after_look(
                job.progress,
                len(members),
                started=started,
                now=time.monotonic(),
                until=until,
                config=self._config,
                min_servers=self._min_servers,
                watched=self.roster.watched,
                loading=bool(loading),
            )
            if look is Look.CONNECT:
                same, self._formed = self._in_step(members), members
                self._requests.clear()
                return Attempt(members=None if same else list(members))
            if newly_short:
                log.warning(
                    "%s: %s; waiting up to %g s",
                    job.ref,
                    self.roster.shortage(self._min_servers),
                    self._config.rejoin_s,
                )
            if look is Look.STOP:
                raise PublishError(f"{job.ref}: {self.roster.shortage(self._min_servers)}")
            if look is Look.WAIT:
                return Wait()
            time.sleep(PAUSE_S)

    def _admit(self, job: Job) -> tuple[ServerEndpoint, ...]:
        try:
            members = self.roster.admit(job.layout, job.probe)
        except ManifestError:
            raise
        except AdapterError as e:
            raise AdapterError(f"{job.ref}: {e}") from e
        self._in_step(members)
        return members

    def _follow(self, job: Job, results: Sequence[Sent]) -> Step:
        """Judge an attempt by the results of the ranks and the answers of the servers."""
        if not sent_in_step(job.ref, job.layout.digest, results):
            self._formed = None
        check_results(job.ref, job.layout.digest, results)
        evidence = self._collect(job, results)
        findings = evidence.findings
        if any(f.broken for f in findings):
            self._formed = None
        job.progress, judgement = judged(job.progress, findings, now=time.monotonic(), timeout_s=self._config.timeout_s)
        self._fleet.end([f.server for f in findings if f.leftover], self._config.ping_s)
        self.roster.exclude(judgement.lost)
        acked_s = time.monotonic()
        probes = self._probe(job, judgement.keep, total_cast(results)) if judgement.complete else {}
        job.progress, move = after_attempt(
            job.progress,
            findings,
            judgement,
            remaining=len(self.roster.members),
            left_s=job.budget.deadline - time.monotonic(),
            config=self._config,
            min_servers=self._min_servers,
        )
        match move:
            case Move.FINISH:
                return self._finish(job, self._report(job, results, evidence, probes, acked_s))
            case Move.AWAIT_SLOT:
                return self._await_slot(job, findings)
            case Move.RETRY:
                log.warning("%s is sent again: %s", job.ref, what_failed(findings, results))
                return self._connect(job)
            case Move.STOP:
                within = f"{job.ref} did not reach all servers within {self._config.timeout_s:g} s"
                raise PublishError(f"{within}: {what_failed(findings, results)}")

    def _finish(self, job: Job, report: PublishReport) -> Step:
        self.roster.served()
        self._served[job.ref.name] = ServedVersion(members=frozenset(self.roster.members), report=report)
        if job.full_s is not None and self._on_wait is not None:
            self._on_wait(job.ref, "")
        return FinishPublish(report=report)

    def _await_slot(self, job: Job, findings: Sequence[ServerFinding]) -> Step:
        """Let the next adapter go ahead if one waits. Raises the servers' refusal when no server had a slot in time."""
        full = [f for f in findings if f.full]
        held = "; ".join(f"{f.server.name}: {f.error}" for f in full)
        now = time.monotonic()
        job.full_s = now if job.full_s is None else job.full_s
        if job.dropped:
            raise PublishError(f"{job.ref}: its adapter is dropped while it waits for a slot")
        if now >= job.full_s + self._config.slot_s and len(full) == len(findings):
            raise ManifestError(RefusalReason.SLOT, f"{job.ref} found no slot within {self._config.slot_s:g} s: {held}")
        log.warning("%s waits for an adapter slot: %s", job.ref, held)
        if self._on_wait is not None:
            self._on_wait(job.ref, held)
        if self._next_turn is not None:
            return Yield(number=self._next_turn)
        time.sleep(PAUSE_S)
        return Wait()

    # ------------------------------------------------------------ answers

    def _collect(self, job: Job, results: Sequence[Sent]) -> Evidence:
        """Wait for all answers up to their deadline, then ping the members that failed."""
        digest, members = adapter_digest(job.layout, (sent.sum for sent in results)), self.roster.members
        replies, failed = self._requests.answers()
        faults = member_faults(members, replies, failed, ref=job.ref, digest=digest, results=results)
        silent = self._fleet.silent(tuple(faults), self._config.ping_s)
        first = job.ref.name not in self._served
        findings = []
        for server in members:
            fault, joining = faults.get(server), server in self.roster.joining
            findings.append(
                ServerFinding(
                    server=server,
                    error=fault.error if fault else None,
                    alive=server not in silent,
                    joining=joining,
                    leftover=fault is not None and fault.foreign and (first or joining),
                )
            )
        return Evidence(digest=digest, replies=replies, findings=findings)

    def _probe(
        self, job: Job, servers: Sequence[ServerEndpoint], cast: CastSums | None
    ) -> dict[ServerEndpoint, ProbeResult]:
        """Score the probe on ``servers``; exclude those that do not answer. Raises a member's ParityError."""
        if job.probe is None:
            return {}
        lossy = cast is not None and cast.error > MAX_LOST
        deadline = max(job.budget.deadline, time.monotonic() + self._config.ping_s)
        posts = self._fleet.probe(servers, job.ref, replace(job.probe, lossy=lossy), self._tolerance, deadline)
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
        waited_s = 0.0 if job.full_s is None else acked_s - job.full_s
        phases = slowest_phases(list(replies.values())) | {
            "pack": max(sent.pack_ms for sent in results),
            "send": max(sent.send_ms for sent in results),
            "ack": (acked_s - job.began_s) * 1e3,
            "probe": (time.monotonic() - acked_s) * 1e3,
            "gate": job.gate_ms,
            "slot": waited_s * 1e3,
        }
        return PublishReport(
            ref=job.ref,
            digest=evidence.digest,
            nbytes=job.layout.nbytes,
            phases=phases,
            acks=server_acks(replies, probes),
            lost=dict(self.roster.lost),
            joined=sorted(s.name for s in self.roster.joining & replies.keys()),
            left=[s.name for s in self.roster.left],
            attempts=job.progress.attempts,
            probe_mean_abs=max((p.mean_abs for p in probes.values()), default=None),
            probe_max_abs=max((p.max_abs for p in probes.values()), default=None),
            differs=all(p.differs for p in probes.values()) if probes else None,
            cast=total_cast(results),
        )

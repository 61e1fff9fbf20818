"""Rank 0's part in a publish: request, collect the answers, decide the next step of all ranks (``decisions``).

publisher thread                 Leader (rank 0)
decide(job, None)                at the start: members?
Attempt: form groups             invite: POST /admin/join to members
         send the shard          announce: POST /admin/publish
decide(job, results)             judge servers and ranks
Yield: another adapter's publish goes ahead, then decide(job, None)
Wait: decide(job, None)          look for servers
FinishPublish                    conclude: report the active version
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from areal_lora.algorithms.merging import MAX_LOST, CastSums
from areal_lora.config.models import WeightSyncConfig
from areal_lora.config.recorded import PROBE_TOLERANCES
from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, PublishError, RefusalReason
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.link.relays import MOST, RelayGroup, relay_tree
from areal_lora.weight_sync.manifest import adapter_digest
from areal_lora.weight_sync.messages import JoinReply, PingReply, PublishReply, ServerEndpoint, SourceEndpoint, listed
from areal_lora.weight_sync.probe import ProbeResult
from areal_lora.weight_sync.trainer import decisions
from areal_lora.weight_sync.trainer.decisions import Move, PublishReport, Sent, Step
from areal_lora.weight_sync.trainer.fleet import Fleet, answers, errors
from areal_lora.weight_sync.trainer.membership import MemberRoster, RendezvousWatch, ServerFinding
from areal_lora.weight_sync.trainer.publish_job import PublishJob

PAUSE_S = 0.1  # between two looks for servers or slots
WAIT_STEP_S = 1.0  # the longest time without a step for the other ranks

log = get_logger(__name__)


class Leader:
    """``servers`` are the first members; ``watch``, if given, shows restarted and further servers.

    ``on_active`` is called in the publisher thread, before ``PublishJob.wait`` returns. ``on_wait`` is called there
    with the version that waits for an adapter slot and with what holds the slots, empty when it has one.
    ``loading`` names the servers that load their model; while there are any, a publish that has too few members waits.
    ``tolerance`` is that of ``check_probe``, ``session`` that of `ShardManifest`, ``most`` that of `relay_tree`.
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
        watch: RendezvousWatch | None = None,
        on_active: Callable[[PublishReport], None] = lambda _: None,
        on_wait: Callable[[AdapterRef, str], None] = lambda *_: None,
        loading: Callable[[], Sequence[str]] = tuple,
        session: int = 0,
        most: int = MOST,
    ) -> None:
        self._config, self._tolerance, self._min_servers = config, tolerance, min_servers
        self._on_active, self._on_wait, self._loading, self._session = on_active, on_wait, loading, session
        self._awaited: Sequence[str] = ()  # servers that load their model, as logged
        self._fleet = Fleet(run, secret)
        self.roster = MemberRoster(self._fleet, servers, ping_s=config.ping_s, watch=watch)
        self._joins: dict[ServerEndpoint, Future[JoinReply]] = {}  # of the attempt, and so are the posts
        self._posts: dict[ServerEndpoint, Future[PublishReply]] = {}
        self._due = 0.0  # when their answers are (time.monotonic)
        self._most, self._tree, self._relays = most, tuple[RelayGroup, ...](), set[ServerEndpoint | None]()
        # Groups whose members are in step, and their sources.
        self._formed, self._formed_sources = set[RelayGroup](), frozenset[int]()
        self._sources: dict[str, frozenset[int]] = {}  # by adapter: the ranks that own its tensors
        # The members that serve the newest version of each adapter, and the report of its publish.
        self._served: dict[str, tuple[frozenset[ServerEndpoint], PublishReport]] = {}

    def changed(self) -> bool:
        """Whether servers are available that hold no version or not each adapter's newest, or members do not answer.

        Callable from any thread.
        """
        members = set(self.roster.members)
        return self.roster.changed() or any(not members <= served for served, _ in list(self._served.values()))

    def close(self) -> None:
        self.roster.close()
        self._fleet.keep(())

    # ------------------------------------------------------------ requests

    def invite(self, groups: Sequence[RelayGroup], sources: Sequence[list[SourceEndpoint]], deadline: float) -> None:
        """Request that all servers of ``groups`` join them by ``deadline``, without waiting for answers.

        ``sources`` are the endpoints of each group.
        """
        self._due = deadline + self._config.answer_s
        self._joins = self._fleet.join(groups, sources, deadline, self._config.answer_s)

    def await_joins(self) -> None:
        """Wait for the answers to ``invite``. Raises PublishError for a member that did not join."""
        for error in errors(answers(self._joins, self._due)).values():
            raise error

    def announce(self, job: PublishJob, deadline: float) -> None:
        """Post the version to all members, without waiting for answers. Its transfer ends by ``deadline``."""
        self._due = deadline + self._config.answer_s
        manifest = replace(job.manifest, session=self._session)
        self._posts = self._fleet.publish(self.roster.members, manifest, job.layout, deadline, self._config.answer_s)

    def drop(self, name: str) -> None:
        """Have the servers free what they hold of adapter ``name``, without waiting for answers."""
        self._served.pop(name, None)
        self._sources.pop(name, None)
        self._fleet.drop(self.roster.members, name, self._config.attempt_s)

    def conclude(self, report: PublishReport) -> None:
        """Report the active version, which all ranks know. Then servers that left may end.

        May take as long as ``on_active`` does, which no deadline bounds.
        """
        self._on_active(report)
        self._fleet.dismiss(self.roster.left, self._config.ping_s)
        self.roster.lost.clear()
        self.roster.left.clear()

    # ------------------------------------------------------------ steps

    def decide(self, job: PublishJob, results: Sequence[Sent] | None, next_turn: int | None = None) -> Step:
        """The next step: after an attempt with the ``results`` of all ranks, else at the start or after a wait.

        Publish ``next_turn`` waits, and could go ahead.
        """
        try:
            if results is not None:
                step = self._follow(job, results, next_turn)
            elif job.progress is None:
                job.progress = decisions.Progress()
                step = self._start(job)
            else:
                step = self._connect(job)
        except ArealLoraError as e:
            intact = bool(self._tree) and self._formed.issuperset(self._tree)
            if not intact:
                self._formed.clear()  # the sources leave
            step = decisions.Fail(failure=decisions.Failure.of(e), intact=intact)
        if isinstance(step, decisions.Wait):
            job.budget.restart()
        return step

    def _start(self, job: PublishJob) -> Step:
        """Use the groups that are formed where nothing has changed."""
        self.roster.joining = set()
        self._sources[job.ref.name] = frozenset(shard.source for shard in job.layout.shards)
        members = self.roster.members
        if members and self._in_step(members) and not self.roster.changed():
            servers, report = self._served.get(job.ref.name, (frozenset(), None))
            if job.repeated and report is not None and report.ref == job.ref and servers >= set(members):
                since = {"lost": dict(self.roster.lost), "left": [s.name for s in self.roster.left]}
                again = msgspec.structs.replace(report, servers=members, joined=[], attempts=0, **since)
                return decisions.FinishPublish(report=again)
            if self._fleet.checked(members, job.layout):
                return self._attempt()
        return self._connect(job)

    def _attempt(self) -> decisions.Attempt:
        """Form the groups of the tree that are not in step; servers without a group below end relaying."""
        self._joins, self._posts = {}, {}
        self._fleet.groups = self._tree
        forming = [group for group in self._tree if group not in self._formed]
        relays = {group.relay for group in self._tree}
        forming += [RelayGroup((), former) for former in self.roster.members if former in self._relays - relays]
        self._relays, self._formed, self._formed_sources = relays, set(self._tree), self._needed
        return decisions.Attempt(groups=forming, sources=sorted(self._needed), shared=len(self._tree) == 1)

    @property
    def _needed(self) -> frozenset[int]:
        """Sources of all adapters: publishes of two adapters in turn need no new groups."""
        return frozenset().union(*list(self._sources.values()))

    def _in_step(self, members: tuple[ServerEndpoint, ...]) -> bool:
        """Whether exactly ``members`` are in groups of all sources, and have taken part in the same broadcasts."""
        if not self._formed_sources >= self._needed:
            self._formed.clear()
        tree = relay_tree(members, self._tree, self._most)
        if (len(tree) > 1) != (len(self._tree) > 1):
            self._formed.clear()  # with relays buckets are smaller, and no memory is shared
        self._tree = tree
        return self._formed.issuperset(self._tree)

    def _connect(self, job: PublishJob) -> Step:
        """Attempt with all servers that answer; wait for a server to return if too few remain."""
        assert job.progress is not None
        started = time.monotonic()
        until = min(started + WAIT_STEP_S, job.budget.deadline)
        while True:
            try:
                members = self.roster.admit(job.layout, job.probe)
            except ManifestError:
                raise
            except AdapterError as e:
                raise AdapterError(f"{job.ref}: {e}") from e
            self._in_step(members)
            if len(members) >= self._min_servers:
                job.progress.short_since, self._awaited = None, ()
                return self._attempt()
            loading, shortage = self._loading(), f"{job.ref}: {self.roster.shortage(self._min_servers)}"
            if loading and loading != self._awaited:
                log.warning("%s: waits without limit for %s: loading the model", job.ref, ", ".join(loading))
            self._awaited = loading
            if job.progress.short_since is None:
                log.warning("%s; waiting up to %g s", shortage, self._config.rejoin_s)
            now = time.monotonic()
            short_s = job.progress.short_for(started, now, loading=bool(loading))
            if self.roster.watcher is None or short_s >= self._config.rejoin_s:
                raise PublishError(shortage)
            if now >= until:
                return decisions.Wait()
            time.sleep(PAUSE_S)

    def _follow(self, job: PublishJob, results: Sequence[Sent], next_turn: int | None) -> Step:
        """Judge an attempt by the results of the ranks and the answers of the servers."""
        assert job.progress is not None
        what = job.ref, job.layout.digest
        if not all(sent.own is None and sent.wire is None and (sent.ref, sent.layout) == what for sent in results):
            self._formed.clear()  # else all ranks have sent it whole: receivers can take another one in the same groups
        decisions.check_results(*what, results)
        digest = adapter_digest(job.layout, (sent.sum for sent in results))
        replies, findings = self._collect(job, digest, results)
        broken = {f.server for f in findings if f.broken}
        self._formed = {group for group in self._formed if broken.isdisjoint({*group.members, group.relay})}
        judgement = job.progress.judge(findings, now=time.monotonic(), timeout_s=self._config.timeout_s)
        self.roster.exclude(judgement.lost)
        acked_s, cast = time.monotonic(), _total_cast(results)
        probes = self._probe(job, judgement.keep, cast) if judgement.complete else {}
        enough, left_s = len(self.roster.members) >= self._min_servers, job.budget.deadline - time.monotonic()
        match job.progress.move(findings, judgement, enough=enough, left_s=left_s, ping_s=self._config.ping_s):
            case Move.FINISH:
                report = self._report(job, results, digest, replies, probes, acked_s)
                self.roster.served()
                self._served[job.ref.name] = frozenset(self.roster.members), report
                if job.full_s is not None:
                    self._on_wait(job.ref, "")
                return decisions.FinishPublish(report=report)
            case Move.AWAIT_SLOT:
                return self._await_slot(job, findings, next_turn)
            case Move.RETRY:
                log.warning("%s is sent again: %s", job.ref, decisions.what_failed(findings, results))
                return self._connect(job)
            case Move.STOP:
                within = f"{job.ref} did not reach all servers within {self._config.timeout_s:g} s"
                raise PublishError(f"{within}: {decisions.what_failed(findings, results)}")

    def _await_slot(self, job: PublishJob, findings: Sequence[ServerFinding], next_turn: int | None) -> Step:
        """Let the next adapter go ahead if one waits. Raises the servers' refusal when no server had a slot in time."""
        full = [f for f in findings if f.full]
        held = listed([f"{f.server.name}: {f.error}" for f in full], "; ")
        now = time.monotonic()
        job.full_s = now if job.full_s is None else job.full_s
        if job.dropped:
            raise PublishError(f"{job.ref}: its adapter is dropped while it waits for a slot")
        if now >= job.full_s + self._config.slot_s and len(full) == len(findings):
            raise ManifestError(RefusalReason.SLOT, f"{job.ref} found no slot within {self._config.slot_s:g} s: {held}")
        log.warning("%s waits for an adapter slot: %s", job.ref, held)
        self._on_wait(job.ref, held)
        if next_turn is not None:
            return decisions.Yield(number=next_turn)
        time.sleep(PAUSE_S)
        return decisions.Wait()

    # ------------------------------------------------------------ answers

    def _collect(
        self, job: PublishJob, digest: str, results: Sequence[Sent]
    ) -> tuple[dict[ServerEndpoint, PublishReply], list[ServerFinding]]:
        """Wait for all answers up to their deadline, then ping the members that failed.

        Where no version was announced, the errors are those of the joins.
        """
        got = answers(self._posts, self._due)
        replies = {server: reply for server, reply in got.items() if isinstance(reply, PublishReply)}
        failed = errors(got) if self._posts else errors(answers(self._joins, self._due))
        findings = decisions.member_findings(
            self.roster.members, replies, failed, ref=job.ref, digest=digest, results=results
        )
        pings = self._fleet.ping_all([f.server for f in findings if f.error is not None], self._config.ping_s)
        busy = {server for server, ping in pings.items() if isinstance(ping, PingReply) and ping.busy}
        silent, joining = errors(pings), self.roster.joining
        return replies, [
            replace(f, alive=f.server not in silent, busy=f.server in busy, joining=f.server in joining)
            for f in findings
        ]

    def _probe(
        self, job: PublishJob, servers: Sequence[ServerEndpoint], cast: CastSums | None
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
        job: PublishJob,
        results: Sequence[Sent],
        digest: str,
        replies: Mapping[ServerEndpoint, PublishReply],
        probes: Mapping[ServerEndpoint, ProbeResult],
        acked_s: float,
    ) -> PublishReport:
        assert job.progress is not None
        members = self.roster.members
        phases: dict[str, float] = {}
        for server in members:
            for name, ms in replies[server].phases.items():
                phases[name] = max(ms, phases.get(name, 0.0))
        phases |= {
            "pack": max(sent.pack_ms for sent in results),
            "send": max(sent.send_ms for sent in results),
            "ack": (acked_s - job.began_s) * 1e3,
            "probe": (time.monotonic() - acked_s) * 1e3,
            "slot": 0.0 if job.full_s is None else (acked_s - job.full_s) * 1e3,
        }
        return PublishReport(
            ref=job.ref,
            digest=digest,
            nbytes=job.layout.nbytes,
            phases=phases,
            servers=members,
            lost=dict(self.roster.lost),
            joined=sorted(s.name for s in self.roster.joining & set(members)),
            left=[s.name for s in self.roster.left],
            attempts=job.progress.attempts,
            probe_mean_abs=max((p.compared for p in probes.values()), default=None),
            probe_max_abs=max((p.max_abs for p in probes.values()), default=None),
            differs=all(p.differs for p in probes.values()) if probes else None,
            cast=_total_cast(results),
        )


def _total_cast(results: Sequence[Sent]) -> CastSums | None:
    """The sums of all ranks; None where no rank casts."""
    casts, total = [sent.cast for sent in results if sent.cast is not None], CastSums()
    for cast in casts:
        total.include(cast)
    return total if casts else None

"""Servers that come and go in virtual time, around the real leader, membership, watcher, router and feed.

The servers, their network and the trainer's transfers are simulated; nothing sleeps. A server that leaves takes part
in publishes until it is dismissed or its grace is over, like ``vllm_ext.server.leaving``; one that crashes does not.
"""

from __future__ import annotations

import heapq
import itertools
import random
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import ManifestError, PublishError, RefusalReason
from areal_lora.rollout import routing
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.groups import Ticket
from areal_lora.rollout.controller.runtime import Capacity
from areal_lora.rollout.routing import LeaseOutcome, Router, ServerLease, VersionRetired
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.link.relays import RelayGroup
from areal_lora.weight_sync.manifest import adapter_digest
from areal_lora.weight_sync.messages import JoinReply, PingReply, PublishReply, ServerEndpoint
from areal_lora.weight_sync.trainer import fleet, leader, membership, publish_job
from areal_lora.weight_sync.trainer.decisions import Attempt, Fail, Failure, FinishPublish, PublishReport, Sent, Wait
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.membership import WATCH_S
from tests.support.clocks import Clock
from tests.support.rollout.helpers import NAME, episode, feed, stream
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, layout_of, ref, share, values

GRACE_S, TRANSFER_S, TRAIN_S, START_S = 20.0, 0.8, 6.0, 40.0
BATCH, SAMPLES, SEQUENCES = 16, 4, 16
KEEP = 4  # versions that a server holds


@dataclass(eq=False)
class Simulated:
    """One session of a server."""

    endpoint: ServerEndpoint
    refs: list[AdapterRef] = field(default_factory=list)
    alive: bool = True
    leaving: bool = False
    published: bool = True
    dismissed: bool = False
    running: int = 0
    receiving: bool = False

    @property
    def answers(self) -> bool:
        return self.alive


class Time:
    """``time`` of the modules under test."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.clock.now

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)


class VirtualFleet:
    """The requests of ``Fleet``, answered by simulated servers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.members: set[ServerEndpoint] = set()
        self.posts: dict[ServerEndpoint, Future[PublishReply]] = {}

    def keep(self, members: Iterable[ServerEndpoint]) -> None:
        self.members = set(members)

    def close(self) -> None:
        pass

    def ping_again(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
        found = self._world.sessions[server]
        if not found.answers:
            raise PublishError("no answer")
        return PingReply(leaving=found.leaving)

    def dismiss(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> None:
        for server in servers:
            self._world.sessions[server].dismissed = True

    def ping_all(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> dict[ServerEndpoint, Any]:
        answering = {s: self._world.sessions[s].answers for s in servers}
        return {s: PingReply() if answers else PublishError("no answer") for s, answers in answering.items()}

    def checked(self, members: Sequence[ServerEndpoint], layout: object) -> bool:
        return True

    def check(self, members: Sequence[ServerEndpoint], *_: object) -> dict[Any, Future[None]]:
        return {server: self._done(server, None) for server in members}

    def join(self, groups: Sequence[RelayGroup], *_: object) -> dict[ServerEndpoint, Future[JoinReply]]:
        return {server: self._done(server, JoinReply(workers=1)) for group in groups for server in group.members}

    def publish(self, members: Sequence[ServerEndpoint], *_: object) -> dict[ServerEndpoint, Future[PublishReply]]:
        self.posts = {server: Future() for server in members}
        return self.posts

    def _done(self, server: ServerEndpoint, answer: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._world.sessions[server].answers:
            future.set_result(answer)
        else:
            future.set_exception(PublishError("refused"))
        return future


@types.coroutine
def _yield(delay_s: float) -> Iterator[None]:
    """``asyncio.sleep`` without an event loop: whoever drives the coroutine comes back later."""
    yield


class World:
    """A run with servers that come and go. Raises AssertionError where a promise is broken."""

    def __init__(self, seed: int, *, servers: int, seconds: float, crashes: float) -> None:
        self.rng, self.clock = random.Random(seed), Clock()
        self._joins, self._seconds, self._crashes = servers, seconds, crashes
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.sessions: dict[ServerEndpoint, Simulated] = {}
        self.happened: Counter[str] = Counter()
        self.announced: dict[str, set[AdapterRef]] = {}  # by URL
        self.reports: list[PublishReport] = []
        self.version, self.attempts = -1, 0
        self._indices = itertools.count()
        self.router, self.capacity = Router(self.clock), Capacity(sequences=SEQUENCES, n_samples=SAMPLES)
        self.feed, _, _ = feed(
            eta=2, b=BATCH, steps=10**6, clock=self.clock, prompts=stream(499), max_running=1, pacing="fresh"
        )
        self.layout = layout_of(share(values(1))[0])

    # ------------------------------------------------------------ time

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.clock.now + delay_s, next(self._order), event))

    def sleep(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.events and self.events[0][0] <= end:
            self.clock.now, _, event = heapq.heappop(self.events)
            event()
        self.clock.now = end

    # ------------------------------------------------------------ servers

    def present(self) -> list[ServerEndpoint]:
        return [s.endpoint for s in self.sessions.values() if s.published]

    def start(self, index: int | None = None) -> None:
        """A new session, of a new name unless ``index`` is given."""
        number = next(self._indices) if index is None else index
        port = len(self.sessions) + 1
        name = f"server-{number}"
        endpoint = ServerEndpoint(name=name, host="h", admin_port=port, data_port=port + 10000, workers=1)
        for other in self.sessions.values():
            if other.endpoint.name == name:
                other.published = False  # its file is replaced
        self.sessions[endpoint] = Simulated(endpoint)
        self.happened["joined"] += 1

    def depart(self) -> None:
        """Some server leaves, or crashes and may be restarted. One stays."""
        there = [s for s in self.sessions.values() if s.alive and not s.leaving]
        if len(there) < 2:
            self.at(5.0, self.depart)
            return
        server = self.rng.choice(there)
        if self.rng.random() >= self._crashes:
            self.happened["left"] += 1
            server.leaving = True
            self._await_end(server, self.clock.now + GRACE_S)
            return
        self.happened["crashed"] += 1
        server.alive = False
        if self.rng.random() < 0.5:
            index = int(server.endpoint.name.partition("-")[2])
            self.at(START_S, lambda: self.start(index))
        else:
            self.happened["gone"] += 1

    def _await_end(self, server: Simulated, until: float) -> None:
        over = self.clock.now >= until
        if not server.receiving and ((server.dismissed and not server.running) or over):
            server.alive = server.published = False
            self.happened["grace over" if over else "released"] += 1
        else:
            self.at(0.05, lambda: self._await_end(server, until))

    # ------------------------------------------------------------ requests

    def admit(self) -> None:
        while (ticket := self.feed.admit()) is not None:
            self.begin(ticket)

    def begin(self, ticket: Ticket) -> None:
        ref = self.feed.begin(ticket)
        if ref is None:
            self.at(0.2, lambda: self.begin(ticket))
            return
        self.ask(ticket, ref)

    def ask(self, ticket: Ticket, ref: AdapterRef) -> None:
        """Send a request as ``CompletionClient`` does: what a leaving server hands back goes to another one."""
        while True:
            try:
                lease = self.router.take(ref, SAMPLES)
            except VersionRetired as error:
                self.failed(ticket, GenerationFault(FaultKind.RETIRED, str(error)))
                return
            if isinstance(lease, float):  # all cool down, or leave
                self.at(0.1, lambda: self.ask(ticket, ref))
                return
            server = lease.server
            host = next(s for s in self.sessions.values() if s.endpoint.data_url == server.url)
            assert ref in self.announced[server.url], f"{ref} was asked of {host.endpoint}, which was not announced"
            if not host.alive and not server.leaving:
                self.end(lease, "failed")
                self.failed(ticket, GenerationFault(FaultKind.CONNECTION, "refused"))
                return
            if not host.leaving and host.alive:
                break
            self.happened["handed back"] += 1
            self.end(lease, "left")
        if ref not in host.refs:  # of a request that was handed back after a long time
            self.end(lease, "retired")
            self.failed(ticket, GenerationFault(FaultKind.RETIRED, "404"))
            return
        host.running += 1
        seconds = min(0.5 * self.rng.paretovariate(1.2), 60.0)
        self.at(seconds, lambda: self.answer(ticket, ref, lease, host))

    def end(self, lease: ServerLease, outcome: LeaseOutcome) -> None:
        lease.outcome = outcome
        self.router.end(lease)

    def answer(self, ticket: Ticket, ref: AdapterRef, lease: ServerLease, host: Simulated) -> None:
        host.running -= 1
        if not host.alive:
            if host.leaving:  # its grace was over: handed back
                self.happened["handed back"] += 1
                self.end(lease, "")
                self.ask(ticket, ref)
            else:
                self.end(lease, "failed")
                self.failed(ticket, GenerationFault(FaultKind.CONNECTION, "died"))
            return
        self.happened["answers"] += 1
        self.end(lease, "succeeded")
        self.feed.finish(ticket, episode(ticket.prompt, ref.version, 2))
        self.admit()

    def failed(self, ticket: Ticket, fault: GenerationFault) -> None:
        self.happened[f"fault {fault.kind}"] += 1
        wait_s = self.feed.retry(ticket, fault)
        if wait_s is not None:
            self.at(wait_s, lambda: self.begin(ticket))

    # ------------------------------------------------------------ trainer

    def on_active(self, active: PublishReport) -> None:
        """What the controller does with an announcement."""
        urls = {s.name: s.data_url for s in active.servers}
        for url in urls.values():
            self.announced.setdefault(url, set()).add(active.ref)
        for server in active.servers:
            assert active.ref in self.sessions[server].refs, f"{server} was announced with {active.ref} and has not"
        self.feed.announce(active.ref.version)
        self.router.announce(active.ref, urls, tuple(active.lost), tuple(active.left))
        self.feed.max_running = self.capacity.groups(len(self.router.servers))
        self.admit()

    def publish(self, version: int) -> None:
        """The publish of a version, as the publisher's thread does it."""
        config = self.config
        made = publish_job.PublishJob(
            manifest=ShardManifest(
                run=RUN, ref=ref(version, NAME), parent=None, base_digest=BASE, layout=self.layout.digest
            ),
            layout=self.layout,
            shard=None,  # type: ignore[arg-type]
            probe=None,
            began_s=self.clock.now,
            budget=publish_job.Budget(config),
        )
        results: list[Sent] | None = None
        crashed = self.happened["crashed"]
        while True:
            match self.leader.decide(made, results):
                case FinishPublish(report=report):
                    self.leader.conclude(report)
                    break
                case Fail(failure=failure):
                    raise AssertionError(f"v{version} was lost: {failure}")
                case Wait():
                    results = None
                case Attempt() as attempt:
                    results = [self.attempt(made, attempt)]
        self.reports.append(report)
        if crashed == self.happened["crashed"]:
            known = any(not self.sessions[s].alive for s in self.leader.roster.members)
            assert report.attempts == 1 or self._crashes, f"v{version}: {report.attempts} attempts, {known}"

    def attempt(self, made: publish_job.PublishJob, attempt: Attempt) -> Sent:
        """One transfer, which a member that is dead breaks for the others, too."""
        self.attempts += 1
        members = self.leader.roster.members
        if attempt.groups:
            self.formed = attempt.groups[0].members
            self.leader.invite(attempt.groups, [], self.clock.now + self.config.attempt_s)
            self.leader.await_joins()
        assert self.formed == members, "the groups are of other members"
        for server in members:
            found = self.sessions[server]
            assert found.alive or not found.leaving, f"{server} has left, and a transfer to it begins"
            found.receiving = True
        self.leader.announce(made, self.clock.now + self.config.attempt_s)
        self.sleep(TRANSFER_S * self.rng.uniform(0.5, 2.0))
        posts = self.fleet.posts
        broken = [s for s in members if not self.sessions[s].alive]
        digest = adapter_digest(self.layout, [7])
        for server, post in posts.items():
            found = self.sessions[server]
            found.receiving = False
            if server in broken:
                post.set_exception(PublishError("no answer"))
            elif broken and self.rng.random() < 0.5:
                post.set_exception(ManifestError(RefusalReason.WIRE, "connection closed by peer"))
            else:
                found.refs = [*[r for r in found.refs if r != made.ref][1 - KEEP :], made.ref]
                post.set_result(PublishReply(ref=str(made.ref), digest=digest, phases={}))
        wire = Failure(kind="failed", message="a receiver has ended") if broken else None
        return Sent(ref=made.ref, layout=self.layout.digest, sum=7, wire=wire)

    def run(self) -> None:
        """The whole hour: versions are made as long as servers come and go, and two after that."""
        self.config = WeightSyncConfig(timeout_s=75.0)
        with pytest.MonkeyPatch.context() as patch:
            for module in (leader, membership, fleet, publish_job):
                patch.setattr(module, "time", Time(self))
            self.fleet = VirtualFleet(self)
            patch.setattr(leader, "Fleet", lambda *_: self.fleet)
            patch.setattr(routing.asyncio, "sleep", _yield)
            patch.setattr(membership, "watched_thread", lambda *_: types.SimpleNamespace(join=lambda: None))
            self.start()
            self.leader = Leader(
                run=RUN, secret=SECRET, servers=self.present(), config=self.config, watch=self, on_active=self.on_active
            )
            for _ in range(self._joins):
                self.at(self.rng.uniform(0, 0.9) * self._seconds, self.start)
                self.at(self.rng.uniform(0.05, 0.95) * self._seconds, self.depart)
            self.at(WATCH_S, self._watch)
            try:
                self._train()
            finally:
                self.leader.close()

    def _watch(self) -> None:
        watcher = self.leader.roster.watcher
        assert watcher is not None
        watcher.look()
        self.at(WATCH_S, self._watch)

    def _train(self) -> None:
        calm = 0
        while calm < 3:
            step = self.version + 1
            self.version = step
            self.publish(step)
            calm += self.clock.now > self._seconds + 2 * START_S
            while (lease := self.feed.take(step)) is None:
                self.sleep(0.5)
                if self.leader.changed():
                    self.publish(step)
                    self.happened["caught up"] += 1
            self.admit()
            assert all(f.oldest >= step - 2 for f in lease.finished)
            self.sleep(TRAIN_S * self.rng.uniform(0.5, 1.5))
            self.feed.commit(step)

    # ------------------------------------------------------------ verdict

    def living(self) -> Mapping[str, str]:
        """URL by name of all servers that are there."""
        return {s.endpoint.name: s.endpoint.data_url for s in self.sessions.values() if s.alive and not s.leaving}

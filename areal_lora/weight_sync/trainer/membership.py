"""Membership of rollout servers in publishes: which join, which are lost, which remain (rank 0).

    every publish    members + joining   -> attempt -> all acknowledged
                                              `-> judge: lost, or once more -> attempt with the rest
    meanwhile        ServerWatcher: servers in the run folder that are not members -> ping -> joining
                                    members -> ping -> silent, or leaving: released before the next attempt

Decisions are pure; ``ServerWatcher`` is the one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, ParityError
from areal_lora.processes.startup import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_indices, read_endpoint
from areal_lora.weight_sync.layout import AdapterLayout, Payload
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.refusal import RefusalReason
from areal_lora.weight_sync.trainer.fleet import Fleet, answers, errors

WATCH_S = 1.0
MISSES = 2  # one may be a busy moment
PINGS = 32  # at once
FIRST_REST_S, LONGER, LONGEST_REST_S = 2.0, 4.0, 300.0  # back-off before an excluded server is tried again

log = get_logger(__name__)


class Sign(Enum):
    """Answer of a server to a ping. ``LEAVES``: it is about to end and waits to be released."""

    SILENT = auto()
    ANSWERS = auto()
    LEAVES = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFinding:
    """Result of one server in an attempt. No ``error``: it serves the version. ``alive``: it answers pings.

    ``joining``: it took part for the first time, beside others. ``leftover``: it holds versions that this trainer
    did not make, from a previous session of the run that continued further or diverged.
    """

    server: ServerEndpoint
    error: ArealLoraError | None = None
    alive: bool = True
    joining: bool = False
    leftover: bool = False

    @property
    def refused(self) -> bool:
        """Whether the server refused the version or the adapter, or acknowledged wrong numbers.

        Neither a broken transfer nor a ``full`` server is a refusal, nor is a layout that a server no longer holds: it
        leaves its groups, and is sent the layout after the next join.
        """
        again = isinstance(self.error, ManifestError) and self.error.reason in (
            RefusalReason.WIRE,
            RefusalReason.UNKNOWN_LAYOUT,
        )
        return isinstance(self.error, (AdapterError, ParityError)) and not again and not self.full

    @property
    def broken(self) -> bool:
        """Whether the server may be out of step with the others. One that refuses, or is full, took all bytes."""
        return self.error is not None and not self.refused and not self.full

    @property
    def full(self) -> bool:
        """Whether the server has no free adapter slot: running requests hold older versions."""
        return isinstance(self.error, ManifestError) and self.error.reason == RefusalReason.SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """``lost`` servers with the reason; ``complete``: all others serve the version."""

    keep: tuple[ServerEndpoint, ...]
    lost: dict[ServerEndpoint, str]
    complete: bool


def judge(findings: Sequence[ServerFinding], *, retried: bool, late: bool = False) -> Judgement:
    """Judge which servers remain after an attempt.

    A member that refuses means that the version is wrong: its error is raised. A joining server that
    refuses beside members that do not is the wrong server: it is lost, and so is a leftover. A server that
    failed and does not answer pings is lost. If all answer, the transfer is repeated once with all; servers
    that still fail (``retried``) are lost, only joining ones if any of them failed: a server that delays the
    others cannot be distinguished from those that it delays. A full server is waited for. It is lost only if another
    server takes the version, when ``late``, or at once if it joins: its slots are no measure for other adapters.
    """
    for f in findings:
        if f.error is not None and f.refused and not f.joining and not f.leftover:
            raise f.error
    failed = [f for f in findings if f.error is not None]
    served = len(failed) < len(findings)
    lost = [f for f in failed if not f.alive or f.refused or (f.full and served and (late or f.joining))]
    if not lost and retried:
        broken = [f for f in failed if not f.full]
        lost = [f for f in broken if f.joining] or broken
    keep = tuple(f.server for f in findings if f not in lost)
    return Judgement(keep=keep, lost={f.server: _reason(f) for f in lost}, complete=len(failed) == len(lost))


def _reason(f: ServerFinding) -> str:
    if f.leftover:
        return f"holds versions of a previous session of the trainer and is shut down: {f.error}"
    if f.full and f.alive:
        return f"has no free adapter slot yet: {f.error}"
    how = "is not fit" if f.refused else "failed again" if f.alive else "does not answer"
    return f"{how}: {f.error}"


class Membership:
    """The members, and the back-off of excluded servers. Only the publisher thread changes a membership.

    A server that has left does not return: its name is used again only by another session, or never.
    """

    def __init__(self, servers: Iterable[ServerEndpoint], clock: Callable[[], float] = time.monotonic) -> None:
        self.members = _ordered(servers)
        self._clock = clock
        self._losses: dict[ServerEndpoint, tuple[int, float]] = {}  # losses in a row, end of the back-off
        self._left: set[ServerEndpoint] = set()

    def wants(self, server: ServerEndpoint) -> bool:
        """Whether a server that is present may become a member. Callable from any thread."""
        _, until = self._losses.get(server, (0, 0.0))
        return server not in self.members and server not in self._left and self._clock() >= until

    def with_joining(self, joining: Iterable[ServerEndpoint]) -> tuple[ServerEndpoint, ...]:
        """Members of the next attempt; a joining server replaces the member of its name, a previous session."""
        wanted = {s.name: s for s in self.members} | {s.name: s for s in joining if self.wants(s)}
        return _ordered(wanted.values())

    def admit(self, members: Iterable[ServerEndpoint]) -> None:
        self.members = _ordered(members)

    def lose(self, lost: Iterable[ServerEndpoint]) -> None:
        """Remove ``lost`` servers. They are not tried again during a back-off, longer each time in a row."""
        removed = set(lost)
        for server in removed:
            times = self._losses.get(server, (0, 0.0))[0] + 1
            self._losses[server] = times, self._clock() + min(FIRST_REST_S * LONGER ** (times - 1), LONGEST_REST_S)
        self.members = tuple(s for s in self.members if s not in removed)

    def release(self, leaving: Iterable[ServerEndpoint]) -> tuple[ServerEndpoint, ...]:
        """Remove members that leave in order, and return them. That is no loss."""
        removed = set(leaving)
        self._left |= removed
        released = tuple(s for s in self.members if s in removed)
        self.members = tuple(s for s in self.members if s not in removed)
        return released

    def succeeded(self) -> None:
        """All members serve what was published."""
        for server in self.members:
            self._losses.pop(server, None)


def _ordered(servers: Iterable[ServerEndpoint]) -> tuple[ServerEndpoint, ...]:
    return tuple(sorted(servers, key=lambda s: (len(s.name), s.name)))


class ServerWatch(Protocol):
    """A source of the servers that are present."""

    def present(self) -> list[ServerEndpoint]:
        """Servers that have announced themselves; some may be dead. Raises OSError if they cannot be read now."""
        ...


class RendezvousWatch:
    """Watch servers that publish their ports in a run folder; restarted servers publish new ports."""

    def __init__(self, run_folder: RunFolder, workers: int) -> None:
        self._run_folder, self._workers = run_folder, workers

    def present(self) -> list[ServerEndpoint]:
        found = []
        for index in published_indices(self._run_folder, "server"):
            if (endpoint := self.server(index)) is not None:
                found.append(endpoint)
        return found

    def server(self, index: int) -> ServerEndpoint | None:
        """Server ``index``, or None if it has not published its ports yet."""
        endpoint = read_endpoint(self._run_folder, "server", index)
        if endpoint is None:
            return None
        return ServerEndpoint(
            name=f"server-{index}",
            host=endpoint.host,
            admin_port=endpoint.ports["admin"],
            data_port=endpoint.ports["data"],
            workers=self._workers,
            data_tls="data" in endpoint.tls,
        )


class ServerWatcher:
    """Ping joining servers and members every ``period_s`` in a separate thread.

    A member leaves if it answers so, or if it is silent and has withdrawn its endpoint. An unreadable folder is read
    again in the next round; members are pinged meanwhile. Any other error ends the process: without this thread no
    server could return and no dead server would be noticed.
    """

    def __init__(
        self,
        watch: ServerWatch,
        membership: Membership,
        ping: Callable[[ServerEndpoint], Sign],
        period_s: float = WATCH_S,
    ) -> None:
        self._watch, self._membership, self._ping, self._period_s = watch, membership, ping, period_s
        self._newcomers: tuple[ServerEndpoint, ...] = ()
        self._missed: dict[ServerEndpoint, int] = {}
        self._leaving: frozenset[ServerEndpoint] = frozenset()
        self._pings = ThreadPoolExecutor(PINGS, thread_name_prefix="server-ping")
        self._readable = True
        self._stop = threading.Event()
        self._thread = watched_thread("server-watch", self._run)

    def joining(self) -> tuple[ServerEndpoint, ...]:
        """Servers that are not members and answered the latest ping."""
        return self._newcomers

    def all_answer(self) -> bool:
        """Whether no member has missed ``MISSES`` pings in a row."""
        return not any(self._missed.get(s, 0) >= MISSES for s in self._membership.members)

    def leaving(self) -> frozenset[ServerEndpoint]:
        """Members that leave in order, or have left."""
        return self._leaving

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._pings.shutdown(wait=False)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.look()

    def look(self) -> None:
        """One round of pings."""
        present, members = self._present(), self._membership.members
        wanted = [s for s in present if self._membership.wants(s)]
        requested = [*wanted, *members]
        signs = dict(zip(requested, self._pings.map(self._ping, requested), strict=True))
        self._newcomers = tuple(s for s in wanted if signs[s] is Sign.ANSWERS)
        self._leaving = frozenset(
            s for s in members if s in self._leaving or self._leaves(s, signs[s], {p.name for p in present})
        )
        missed = self._missed
        self._missed = {s: missed.get(s, 0) + 1 if signs[s] is Sign.SILENT else 0 for s in members}

    def _leaves(self, member: ServerEndpoint, sign: Sign, present: Collection[str]) -> bool:
        """A server that crashed leaves its endpoint behind, one that was restarted has a new one."""
        withdrawn = self._readable and member.name not in present
        return sign is Sign.LEAVES or (sign is Sign.SILENT and withdrawn)

    def _present(self) -> Sequence[ServerEndpoint]:
        """Servers that are present; the latest joining ones if they cannot be read."""
        try:
            present = self._watch.present()
        except OSError as error:
            if self._readable:
                log.warning("cannot look for rollout servers, trying again: %s", error)
            self._readable = False
            return self._newcomers
        self._readable = True
        return present


SCORE_PINGS = 5  # scores of the probe take longer than a ping


class MemberRoster:
    """``joining`` joined during the publish in progress; ``lost`` has the reasons, by name, since the last report.

    ``left`` are the servers that left in order since the last report.

    ``watch``, if given, shows restarted and further servers. Only the publisher thread changes a roster.
    """

    def __init__(
        self, fleet: Fleet, servers: Iterable[ServerEndpoint], *, ping_s: float, watch: ServerWatch | None = None
    ) -> None:
        self._fleet, self._ping_s = fleet, ping_s
        self._membership = Membership(servers)
        self._watcher: ServerWatcher | None = None
        if watch is not None:
            self._watcher = ServerWatcher(watch, self._membership, self._sign)
        self.joining: set[ServerEndpoint] = set()
        self.lost: dict[str, str] = {}
        self.left: list[ServerEndpoint] = []

    @property
    def members(self) -> tuple[ServerEndpoint, ...]:
        return self._membership.members

    @property
    def watched(self) -> bool:
        """Whether further servers can become members."""
        return self._watcher is not None

    def available(self) -> tuple[ServerEndpoint, ...]:
        """Servers that are not members and answer pings; callable from any thread."""
        found = self._watcher.joining() if self._watcher is not None else ()
        return tuple(filter(self._membership.wants, found))

    def changed(self) -> bool:
        """Whether servers are available, leave or do not answer; callable from any thread."""
        watcher = self._watcher
        if watcher is None:
            return False
        return bool(self.available() or watcher.leaving() & set(self.members)) or not watcher.all_answer()

    def admit(self, layout: AdapterLayout, probe: ProbeExpectation | None = None) -> tuple[ServerEndpoint, ...]:
        """Make all members and available servers that answer and can serve ``layout`` the members.

        Servers that leave are released first. Raises AdapterError if an old member cannot serve ``layout``.
        """
        self.release()
        plan, before = self._membership.with_joining(self.available()), set(self.members)
        self.joining |= set(plan) - before
        for server in before - set(plan):
            self._lose(server, "was restarted")
        self._membership.admit(plan)
        self._fleet.keep(plan)
        self.exclude_failed(self._fleet.silent(plan, self._ping_s))
        # Merged: the answer includes the server's first scores.
        patience_s = self._ping_s * (SCORE_PINGS if layout.payload is Payload.MERGED else 1)
        checks = self._fleet.check(self.members, layout, probe, patience_s)
        self.exclude_failed(errors(answers(checks, time.monotonic() + patience_s)))
        return self.members

    def release(self) -> None:
        """Release the members that leave in order."""
        if self._watcher is None:
            return
        released = self._membership.release(self._watcher.leaving())
        for server in released:
            log.info("rollout server %s leaves", server)
        self.left += released
        self._fleet.keep(self.members)

    def exclude_failed(self, failed: Mapping[ServerEndpoint, ArealLoraError]) -> None:
        """Exclude members that failed outside of a transfer. Raises the error of one that refuses the version."""
        findings = [
            ServerFinding(server=s, error=failed.get(s), alive=False, joining=s in self.joining) for s in self.members
        ]
        self.exclude(judge(findings, retried=False).lost)

    def exclude(self, lost: Mapping[ServerEndpoint, str]) -> None:
        """Remove the servers in ``lost``, with the reasons, from the members. One that leaves is no loss."""
        if not lost:
            return
        self.release()
        crashed = {server: reason for server, reason in lost.items() if server not in self.left}
        for server, reason in crashed.items():
            self._lose(server, reason)
        self._membership.lose(crashed)
        self._fleet.keep(self.members)

    def shortage(self, min_servers: int) -> str:
        """Text of how many servers remain and why the others were lost."""
        lost = "; ".join(f"{name} {why}" for name, why in self.lost.items()) or "none was lost in this publish"
        return (
            f"{len(self.members)} rollout servers remain, cluster.min_servers is {min_servers} "
            f"({lost}); see the servers' logs"
        )

    def served(self) -> None:
        """All members serve what was published."""
        self._membership.succeeded()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()

    def _lose(self, server: ServerEndpoint, reason: str) -> None:
        log.error("rollout server %s is excluded: it %s", server, reason)
        self.lost[server.name] = reason

    def _sign(self, server: ServerEndpoint) -> Sign:
        try:
            return Sign.LEAVES if self._fleet.ping(server, self._ping_s).leaving else Sign.ANSWERS
        except ArealLoraError:
            return Sign.SILENT

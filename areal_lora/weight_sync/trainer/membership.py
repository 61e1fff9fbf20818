"""Membership of rollout servers in publishes: which join, which are lost, which remain (rank 0).

    every publish    members + joining   -> attempt -> all acknowledged
                                              `-> judge: lost, or once more -> attempt with the rest
    meanwhile        ServerWatcher: servers in the run folder that are not members -> ping -> joining
                                    members -> ping -> silent, or leaving: released before the next attempt

Decisions are pure; ``ServerWatcher`` is the one thread.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, ParityError, RefusalReason
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_files, read_endpoint
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.messages import PingReply, ServerEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.fleet import PINGS, Fleet, answers, errors

WATCH_S = 1.0
MISSES = 2  # one may be a busy moment
CHECK_PINGS = 5  # the modules of a large MoE are megabytes, and scores of a probe take longer than a ping
FIRST_REST_S, LONGER, LONGEST_REST_S = 2.0, 4.0, 300.0  # back-off before an excluded server is tried again

NO_REFUSAL = (RefusalReason.WIRE, RefusalReason.UNKNOWN_LAYOUT, RefusalReason.SLOT)
"""A broken transfer, no slot, and a layout that a server no longer holds: it leaves its groups, and is sent it then."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFinding:
    """Result of one server in an attempt. No ``error``: it serves the version. ``alive``: it answers pings.

    ``joining``: it took part for the first time, beside others. ``unsent``: for an error of others it got no version.
    ``busy``: after its answer, or without one, it is still in an earlier publish or join.
    """

    server: ServerEndpoint
    error: ArealLoraError | None = None
    alive: bool = True
    joining: bool = False
    unsent: bool = False
    busy: bool = False

    @property
    def refused(self) -> bool:
        """Whether the server refused the version or the adapter, or acknowledged wrong numbers."""
        return isinstance(self.error, (AdapterError, ParityError)) and self._reason not in NO_REFUSAL

    @property
    def broken(self) -> bool:
        """Whether the server may be out of step with the others. One that refuses, or is full, took all bytes."""
        return self.error is not None and not self.refused and not self.full

    @property
    def full(self) -> bool:
        """Whether the server has no free adapter slot: running requests hold older versions."""
        return self._reason == RefusalReason.SLOT

    @property
    def _reason(self) -> str:
        return self.error.reason if isinstance(self.error, ManifestError) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """``lost`` servers with the reason; ``complete``: all others serve the version."""

    keep: tuple[ServerEndpoint, ...]
    lost: dict[ServerEndpoint, str]
    complete: bool


def judge(
    findings: Sequence[ServerFinding], *, retried: bool, before: Collection[ServerEndpoint] = (), late: bool = False
) -> Judgement:
    """Judge which servers remain after an attempt.

    A member that refuses means that the version is wrong: its error is raised. A joining server that refuses is the
    wrong server: it is lost. A server that failed and does not answer pings is lost. If all answer, the transfer is
    repeated once with all; of servers that still fail (``retried``) the causes are lost: a server that hangs fails all
    that wait for it. Each mark of a cause counts where a failed server has it: an error of its own, a failure also in
    the attempt ``before``, busy, joining. A full server is waited for. It is lost only if another server takes the
    version, when ``late``, or at once if it joins.
    """
    for f in findings:
        if f.error is not None and f.refused and not f.joining:
            raise f.error
    failed = [f for f in findings if f.error is not None]
    served = len(failed) < len(findings)
    lost = [f for f in failed if not f.alive or f.refused or (f.full and served and (late or f.joining))]
    if not lost and retried:
        lost = [f for f in failed if not f.full]
        lost = [f for f in lost if not f.unsent] or lost
        # One that joins now was in no attempt before.
        lost = [f for f in lost if f.server in before or (f.joining and f.busy)] or lost
        lost = [f for f in lost if f.busy] or lost
        lost = [f for f in lost if f.joining] or lost
    keep = tuple(f.server for f in findings if f not in lost)
    return Judgement(keep=keep, lost={f.server: _reason(f) for f in lost}, complete=len(failed) == len(lost))


def _reason(f: ServerFinding) -> str:
    if f.full and f.alive:
        return f"has no free adapter slot yet: {f.error}"
    how = "is not fit" if f.refused else "failed again" if f.alive else "does not answer"
    return f"{how}: {f.error}"


def rounds(members: int) -> float:
    """Periods from one ping of each member to the next: more members are no more pings a second."""
    return max(1.0, members / PINGS)


def _ordered(servers: Iterable[ServerEndpoint]) -> tuple[ServerEndpoint, ...]:
    return tuple(sorted(servers, key=lambda s: (len(s.name), s.name)))


class RendezvousWatch:
    """Watch servers that publish their ports in a run folder; restarted servers publish new ports."""

    def __init__(self, run_folder: RunFolder, workers: int) -> None:
        self._run_folder, self._workers = run_folder, workers
        self._read: dict[int, tuple[tuple[int, int], ServerEndpoint]] = {}  # by index, with the file's identity

    def present(self) -> list[ServerEndpoint]:
        """Servers that have published their ports; some may be dead. Raises OSError if they cannot be read now."""
        found, known = dict[int, tuple[tuple[int, int], ServerEndpoint]](), self._read
        for index, identity in published_files(self._run_folder, "server").items():
            server = known[index][1] if known.get(index, ((), None))[0] == identity else self.server(index)
            if server is not None:
                found[index] = identity, server
        self._read = found
        return [server for _, server in found.values()]

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
            workers=endpoint.workers or self._workers,
            relays=endpoint.workers is None,
            data_tls="data" in endpoint.tls,
        )


class ServerWatcher:
    """Ping joining servers and members every ``period_s``, or ``rounds`` of them, in a separate thread.

    ``joining`` are not members, and answered the latest ping as not busy: one that hangs in a publish would delay the
    next one, too. ``leaving`` are members that leave in order, or have left: they answer so, or are silent and have
    withdrawn their endpoint. An unreadable folder is read again in the next round. Any other error ends the process:
    without this thread no server could return.
    """

    def __init__(
        self,
        watch: RendezvousWatch,
        roster: "MemberRoster",
        ping: Callable[[ServerEndpoint], PingReply | None],
        period_s: float = WATCH_S,
    ) -> None:
        self._watch, self._roster, self._ping, self._period_s = watch, roster, ping, period_s
        self.joining: tuple[ServerEndpoint, ...] = ()
        self.leaving: frozenset[ServerEndpoint] = frozenset()
        self._missed: dict[ServerEndpoint, int] = {}
        self._pings = ThreadPoolExecutor(PINGS, thread_name_prefix="server-ping")
        self._readable = True
        self._stop = threading.Event()
        self._thread = watched_thread("server-watch", self._run)

    def all_answer(self) -> bool:
        """Whether no member has missed ``MISSES`` pings in a row."""
        return not any(self._missed.get(s, 0) >= MISSES for s in self._roster.members)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._pings.shutdown(wait=False)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s * rounds(len(self._roster.members))):
            self.look()

    def look(self) -> None:
        """One round of pings."""
        members = self._roster.members
        try:
            present: Sequence[ServerEndpoint] = self._watch.present()
            self._readable = True
        except OSError as error:
            if self._readable:
                log.warning("cannot look for rollout servers, trying again: %s", error)
            present, self._readable = self.joining, False
        wanted = [s for s in present if self._roster.wants(s)]
        requested = [*wanted, *members]
        replies = dict(zip(requested, self._pings.map(self._ping, requested), strict=True))
        self.joining = tuple(s for s in wanted if (reply := replies[s]) and not (reply.leaving or reply.busy))
        # A server that crashed leaves its endpoint behind, one that was restarted has a new one.
        names = {s.name for s in (present if self._readable else members)}
        self.leaving = frozenset(
            s for s in members if s in self.leaving or (reply.leaving if (reply := replies[s]) else s.name not in names)
        )
        missed = self._missed
        self._missed = {s: missed.get(s, 0) + 1 if replies[s] is None else 0 for s in members}


class MemberRoster:
    """Members of the next attempt, and the back-off of excluded servers. Only the publisher thread changes a roster.

    ``joining`` joined during the publish in progress; since the last report ``lost`` were excluded (reasons by name),
    and ``left`` have left in order. A server that has left does not return: its name is used again only by another
    session, or never. ``watch``, if given, shows restarted and further servers.
    """

    def __init__(
        self, fleet: Fleet, servers: Iterable[ServerEndpoint], *, ping_s: float, watch: RendezvousWatch | None = None
    ) -> None:
        self._fleet, self._ping_s = fleet, ping_s
        self.members = _ordered(servers)
        self.joining: set[ServerEndpoint] = set()
        self.lost: dict[str, str] = {}
        self.left: list[ServerEndpoint] = []
        self._losses: dict[ServerEndpoint, tuple[int, float]] = {}  # losses in a row, end of the back-off
        self._departed: set[ServerEndpoint] = set()
        self.watcher = ServerWatcher(watch, self, self._ping) if watch is not None else None

    def wants(self, server: ServerEndpoint) -> bool:
        """Whether a server that is present may become a member. Callable from any thread."""
        _, until = self._losses.get(server, (0, 0.0))
        return server not in self.members and server not in self._departed and time.monotonic() >= until

    def available(self) -> tuple[ServerEndpoint, ...]:
        """Servers that are not members and answer pings; callable from any thread."""
        return tuple(filter(self.wants, self.watcher.joining)) if self.watcher is not None else ()

    def changed(self) -> bool:
        """Whether servers are available, leave or do not answer; callable from any thread."""
        watcher = self.watcher
        if watcher is None:
            return False
        return bool(self.available() or watcher.leaving & set(self.members)) or not watcher.all_answer()

    def with_joining(self, joining: Iterable[ServerEndpoint]) -> tuple[ServerEndpoint, ...]:
        """Members of the next attempt; a joining server replaces the member of its name, a previous session."""
        wanted = {s.name: s for s in self.members} | {s.name: s for s in joining if self.wants(s)}
        return _ordered(wanted.values())

    def admit(self, layout: AdapterLayout, probe: ProbeExpectation | None = None) -> tuple[ServerEndpoint, ...]:
        """Make all members and available servers that answer and can serve ``layout`` the members.

        Servers that leave are released first. Raises AdapterError if an old member cannot serve ``layout``.
        """
        self.release(self.watcher.leaving if self.watcher is not None else ())
        plan, before = self.with_joining(self.available()), set(self.members)
        self.joining |= set(plan) - before
        for server in before - set(plan):
            self._note_loss(server, "was restarted")
        self.keep(plan)
        self.exclude_failed(errors(self._fleet.ping_all(plan, self._ping_s)))
        patience_s = CHECK_PINGS * self._ping_s
        checks = self._fleet.check(self.members, layout, probe, patience_s)
        self.exclude_failed(errors(answers(checks, time.monotonic() + patience_s)))
        return self.members

    def keep(self, members: Iterable[ServerEndpoint]) -> None:
        self.members = _ordered(members)
        self._fleet.keep(self.members)

    def release(self, leaving: Collection[ServerEndpoint]) -> None:
        """Release members that leave in order. That is no loss."""
        self._departed.update(leaving)
        released = [s for s in self.members if s in leaving]
        for server in released:
            log.info("rollout server %s leaves", server)
        self.left += released
        self.keep(s for s in self.members if s not in leaving)

    def exclude_failed(self, failed: Mapping[ServerEndpoint, ArealLoraError]) -> None:
        """Exclude members that failed outside of a transfer. Raises the error of one that refuses the version."""
        findings = [
            ServerFinding(server=s, error=failed.get(s), alive=False, joining=s in self.joining) for s in self.members
        ]
        self.exclude(judge(findings, retried=False).lost)

    def exclude(self, lost: Mapping[ServerEndpoint, str]) -> None:
        """Remove the servers in ``lost``, with the reasons, from the members. One that leaves is no loss.

        They are not tried again during a back-off, longer each time in a row.
        """
        if not lost:
            return
        self.release(self.watcher.leaving if self.watcher is not None else ())
        for server, reason in lost.items():
            if server not in self.left:
                self._note_loss(server, reason)
                times = self._losses.get(server, (0, 0.0))[0] + 1
                rest_s = min(FIRST_REST_S * LONGER ** (times - 1), LONGEST_REST_S)
                self._losses[server] = times, time.monotonic() + rest_s
        self.keep(s for s in self.members if s not in lost)

    def shortage(self, min_servers: int) -> str:
        """Text of how many servers remain and why the others were lost."""
        lost = "; ".join(f"{name} {why}" for name, why in self.lost.items()) or "none was lost in this publish"
        return (
            f"{len(self.members)} rollout servers remain, cluster.min_servers is {min_servers} "
            f"({lost}); see the servers' logs"
        )

    def served(self) -> None:
        """All members serve what was published."""
        for server in self.members:
            self._losses.pop(server, None)

    def close(self) -> None:
        if self.watcher is not None:
            self.watcher.close()

    def _note_loss(self, server: ServerEndpoint, reason: str) -> None:
        log.error("rollout server %s is excluded: it %s", server, reason)
        self.lost[server.name] = reason

    def _ping(self, server: ServerEndpoint) -> PingReply | None:
        try:
            return self._fleet.ping_again(server, self._ping_s)
        except ArealLoraError:
            return None

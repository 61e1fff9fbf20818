"""Which rollout server gets a request: that of its conversation, else the one with the fewest sequences outstanding.

The trainer's announcements name the servers and the versions they hold. Only servers that hold the requested version
and are not cooling down after a failure are considered. A server that failed gets no requests for a time that doubles
with each failure; the first request after that is its trial. A server that the trainer has excluded gets no requests
until it is announced again, and its running requests are cut off, so that another server can have them. A server that
leaves gets no requests either, but ends those that run; what it hands back goes to another server.

A conversation stays on its server, whose prefix cache has its tokens, and starts on the server of its group, which has
their prompt. It moves when that server is not available, or has too many sequences more than the least loaded one. It
stays on its version, too, for some publishes: a new version would find no token in the cache, and the oldest token
alone decides how stale a sequence is.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, TypeAlias

from areal_lora.errors import RolloutError
from areal_lora.types import AdapterRef

COOL_DOWN_S = 0.25
MAX_COOL_DOWN_S = 10.0
LEAVING_S = 0.1  # between two looks while all servers that hold a version leave
KEEP_VERSIONS = 64  # of an adapter, back from the newest: rollouts request that one, evaluations for a few before


class VersionRetired(RolloutError):
    """No server holds the requested adapter version any more (or yet)."""


@dataclass(slots=True, eq=False)
class Server:
    """One session of a replica, under one URL.

    One that is ``leaving`` takes no more requests; it is known until the trainer announces a version without it.
    ``watchers`` are called when it leaves or is lost.
    """

    url: str
    outstanding: int = 0
    failures: int = 0
    down_until_s: float = 0.0
    lost: bool = False
    leaving: bool = False
    clocks: set[asyncio.Timeout] = field(default_factory=set)
    watchers: "set[Callable[[Server], None]]" = field(default_factory=set)

    def lose(self) -> None:
        """End the running requests now, instead of at their deadlines."""
        self.lost = True
        for clock in self.clocks:
            if not clock.expired():
                clock.reschedule(asyncio.get_running_loop().time())
        self._tell()

    def leave(self) -> None:
        self.leaving = True
        self._tell()

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher(self)


LeaseOutcome: TypeAlias = Literal["", "succeeded", "failed", "left", "retired"]
"""What a request shows of its server."""


@dataclass(slots=True, kw_only=True)
class ServerLease:
    """A request's server, and the version that it is for."""

    server: Server
    ref: AdapterRef
    sequences: int
    outcome: LeaseOutcome = ""


@dataclass(slots=True)
class Home:
    """The server that has a conversation's tokens in its prefix cache, if any, under version ``ref``.

    It starts on the server of its ``group``.
    """

    group: "Home | None" = None
    server: Server | None = None
    ref: AdapterRef | None = None

    def each(self) -> "Iterator[Home]":
        """This one, then its groups."""
        home: Home | None = self
        while home is not None:
            yield home
            home = home.group


_load = attrgetter("outstanding")


class Router:
    """Chooses servers and remembers what they hold and how they fare. ``servers`` are by name.

    A conversation moves from a server with over ``max_behind`` sequences more than the least loaded one, and from a
    version more than ``max_lag`` before the newest one: servers keep those that can still be trained on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_behind: int = 0, max_lag: int = 0) -> None:
        self.servers: dict[str, Server] = {}
        # By adapter, its versions in order with the servers that hold them; sequences are shared between versions.
        self._holders: dict[str, dict[AdapterRef, Sequence[Server]]] = {}
        self._members: Sequence[Server] = ()
        self._urls: Mapping[str, str] = {}
        self._clock, self._max_behind, self._max_lag = clock, max_behind, max_lag

    def announce(
        self, ref: AdapterRef, servers: Mapping[str, str], lost: Iterable[str] = (), left: Iterable[str] = ()
    ) -> None:
        """``ref`` serves on ``servers`` (URL by name) and nowhere else: a publish is complete only then (contract C3).

        ``lost`` were excluded before; a server that is also among ``servers``, or has a new URL, is a new
        session and holds ``ref`` only. Servers that ``left`` end what they run.
        """
        lost = frozenset(lost)
        if lost or servers != self._urls:
            self._change_members(servers, lost, frozenset(left))
        held = self._holders.setdefault(ref.name, {})
        for other in [r for r in held if not ref.version - KEEP_VERSIONS < r.version < ref.version]:
            del held[other]  # later ones were rolled back
        held[ref] = self._members

    def _change_members(self, servers: Mapping[str, str], lost: frozenset[str], left: frozenset[str]) -> None:
        ended = set[Server]()
        for name, server in list(self.servers.items()):
            if name in lost or servers.get(name) != server.url:
                if name in left:
                    server.leave()
                if not server.leaving:
                    server.lose()
                ended.add(self.servers.pop(name))
        for name, url in servers.items():
            self.servers.setdefault(name, Server(url))
        self._members, self._urls = tuple(self.servers.values()), dict(servers)
        remaining = {id(on): on for held in self._holders.values() for on in held.values()}
        remaining = {key: tuple(s for s in on if s not in ended) for key, on in remaining.items()}
        for held in self._holders.values():
            held.update({ref: remaining[id(on)] for ref, on in held.items()})

    def forget(self, adapter: str) -> None:
        self._holders.pop(adapter, None)

    def retired(self, server: Server, ref: AdapterRef) -> None:
        """``server`` has answered that it does not hold ``ref``."""
        held = self._holders.get(ref.name, {})
        if ref in held:
            held[ref] = tuple(s for s in held[ref] if s is not server)

    def figures(self) -> dict[str, float]:
        """Of `obs.machine`. Callable from any thread."""
        return {"sequences_outstanding": sum(server.outstanding for server in list(self.servers.values()))}

    def holds(self, ref: AdapterRef) -> bool:
        """Whether a server holds exactly this version."""
        return bool(self._holders.get(ref.name, {}).get(ref))

    def newest(self, ref: AdapterRef, home: Home | None = None) -> AdapterRef:
        """The newest version of ``ref``'s adapter that a server holds, or that of the conversation at ``home``.

        ``ref`` where no server holds any.
        """
        held = self._holders.get(ref.name, {})
        found = next((r for r in reversed(held) if held[r]), ref)
        if home is None:
            return found
        if (
            home.ref is None
            or home.server is None
            or found.version - home.ref.version > self._max_lag
            or home.server not in held.get(home.ref, ())
            or not self._is_fit(home.server)
        ):
            home.ref = found
        return home.ref

    def _is_fit(self, server: Server) -> bool:
        return self._clock() >= server.down_until_s and not server.leaving

    def failed(self, server: Server) -> None:
        """Start a cool-down; failures of requests sent before it do not lengthen it."""
        now = self._clock()
        if now >= server.down_until_s:
            server.failures += 1
            server.down_until_s = now + min(COOL_DOWN_S * 2 ** (server.failures - 1), MAX_COOL_DOWN_S)

    def succeeded(self, server: Server) -> None:
        server.failures = 0
        server.down_until_s = 0.0

    @asynccontextmanager
    async def lease(
        self, ref: AdapterRef, sequences: int, clock: asyncio.Timeout, home: Home | None = None, *, exactly: bool = True
    ) -> AsyncIterator[ServerLease]:
        """As `take`, which it waits for. ``clock`` bounds the request, and runs out at once if the server is lost."""
        while isinstance(lease := self.take(ref, sequences, home, exactly=exactly), float):
            await asyncio.sleep(lease)
        lease.server.clocks.add(clock)
        try:
            yield lease
        finally:
            lease.server.clocks.discard(clock)
            self.end(lease)

    def take(
        self, ref: AdapterRef, sequences: int, home: Home | None = None, *, exactly: bool = True
    ) -> ServerLease | float:
        """Lease a server that holds ``ref``, or unless ``exactly`` its `newest` version; that of ``home`` if it is fit.

        Seconds to wait where all cool down or leave. Raises VersionRetired if none holds the version.
        """
        ref = ref if exactly else self.newest(ref, home)
        holders = self._holders.get(ref.name, {}).get(ref, ())
        if not holders:
            raise VersionRetired(f"no rollout server holds {ref}")
        now = self._clock()
        least = min(holders, key=_load)
        if least.leaving or now < least.down_until_s:  # one that fails has the fewest
            staying = [server for server in holders if not server.leaving]
            healthy = [server for server in staying if now >= server.down_until_s]
            if not healthy:
                until_s = min((server.down_until_s for server in staying), default=now + LEAVING_S)
                return max(0.01, until_s - now)
            least = min(healthy, key=_load)
        server = least if home is None else self._settle(home, least, holders)
        server.outstanding += sequences
        return ServerLease(server=server, ref=ref, sequences=sequences)

    def end(self, lease: ServerLease) -> None:
        lease.server.outstanding -= lease.sequences
        match lease.outcome:
            case "succeeded":
                self.succeeded(lease.server)
            case "failed":
                self.failed(lease.server)
            case "left":
                lease.server.leave()
            case "retired":
                self.retired(lease.server, lease.ref)

    def _settle(self, home: Home, least: Server, holders: Sequence[Server]) -> Server:
        """The server of ``home`` or of its group if it is fit, else ``least``, which takes its place."""
        for each in home.each():
            server = each.server
            if (
                server is not None
                and server.outstanding - least.outstanding <= self._max_behind
                and self._is_fit(server)
                and server in holders
            ):
                break
        else:
            server = least
        home.server = server
        for group in home.each():
            if group.server is None or group.server.lost or group.server.leaving:
                group.server = server
        return server

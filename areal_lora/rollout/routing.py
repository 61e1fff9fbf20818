"""Which rollout server gets a request: the one with the fewest sequences outstanding.

The trainer's announcements name the servers and the versions they hold. Only servers that hold the requested version
and are not cooling down after a failure are considered. A server that failed gets no requests for a time that doubles
with each failure; the first request after that is its trial. A server that the trainer has excluded gets no requests
until it is announced again, and its running requests are cut off, so that another server can have them. A server that
leaves gets no requests either, but ends those that run; what it hands back goes to another server.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from areal_lora.errors import RolloutError
from areal_lora.types import AdapterRef

COOL_DOWN_S = 0.25
MAX_COOL_DOWN_S = 10.0
LEAVING_S = 0.1  # between two looks while all servers that hold a version leave
KEEP_VERSIONS = 64  # of an adapter, back from the newest: rollouts request that one, evaluations for a few before


class VersionRetired(RolloutError):
    """No server holds the requested adapter version any more (or yet)."""


@dataclass(slots=True)
class Server:
    """One session of a replica, under one URL.

    One that is ``leaving`` takes no more requests; it is known until the trainer announces a version without it.
    """

    url: str
    outstanding: int = 0
    failures: int = 0
    down_until_s: float = 0.0
    versions: set[AdapterRef] = field(default_factory=set)
    lost: bool = False
    leaving: bool = False
    clocks: set[asyncio.Timeout] = field(default_factory=set)

    def lose(self) -> None:
        """End the running requests now, instead of at their deadlines."""
        self.lost = True
        for clock in self.clocks:
            if not clock.expired():
                clock.reschedule(asyncio.get_running_loop().time())


class Router:
    """Chooses servers and remembers what they hold and how they fare. ``servers`` are by name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.servers: dict[str, Server] = {}
        self._announced: dict[str, AdapterRef] = {}  # the last one of each adapter
        self._clock = clock

    def announce(
        self, ref: AdapterRef, servers: Mapping[str, str], lost: Iterable[str] = (), left: Iterable[str] = ()
    ) -> None:
        """``ref`` serves on ``servers`` (URL by name) and nowhere else: a publish is complete only then (contract C3).

        ``lost`` were excluded before; a server that is also among ``servers``, or has a new URL, is a new
        session and holds ``ref`` only. Servers that ``left`` end what they run.
        """
        for name, server in list(self.servers.items()):
            if name in lost or servers.get(name) != server.url:
                if name in left:
                    server.leaving = True
                if not server.leaving:
                    server.lose()
                del self.servers[name]
        self._announced[ref.name] = ref
        for name, url in servers.items():
            server = self.servers.setdefault(name, Server(url))
            server.versions = {r for r in server.versions if r.name != ref.name or _beside(r, ref)} | {ref}

    def figures(self) -> dict[str, float]:
        """Of `obs.machine`. Callable from any thread."""
        return {"sequences_outstanding": sum(server.outstanding for server in list(self.servers.values()))}

    def newest(self, ref: AdapterRef) -> AdapterRef:
        """The newest version of ``ref``'s adapter that a server holds; ``ref`` where none holds any."""
        announced = self._announced.get(ref.name, ref)
        if any(announced in server.versions for server in self.servers.values()):
            return announced
        held = (r for server in self.servers.values() for r in server.versions if r.name == ref.name)
        return max(held, default=ref)

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
    async def lease(self, ref: AdapterRef, sequences: int, clock: asyncio.Timeout) -> AsyncIterator[Server]:
        """A server for ``sequences`` sequences of ``ref``; waits while all that hold it cool down or leave.

        ``clock`` bounds the request and runs out at once if the server is excluded (``lost``).
        Raises VersionRetired if none holds ``ref``.
        """
        server = await self._choose(ref)
        server.outstanding += sequences
        server.clocks.add(clock)
        try:
            yield server
        finally:
            server.clocks.discard(clock)
            server.outstanding -= sequences

    async def _choose(self, ref: AdapterRef) -> Server:
        while True:
            holders = [s for s in self.servers.values() if ref in s.versions and not s.leaving]
            if not holders and any(ref in s.versions for s in self.servers.values()):
                await asyncio.sleep(LEAVING_S)
                continue
            if not holders:
                raise VersionRetired(f"no rollout server holds {ref}")
            now = self._clock()
            healthy = [server for server in holders if now >= server.down_until_s]
            if healthy:
                return min(healthy, key=lambda server: server.outstanding)
            await asyncio.sleep(max(0.01, min(server.down_until_s for server in holders) - now))


def _beside(held: AdapterRef, newest: AdapterRef) -> bool:
    """Whether a version may still be requested once ``newest`` is announced; later ones were rolled back."""
    return newest.version - KEEP_VERSIONS < held.version <= newest.version

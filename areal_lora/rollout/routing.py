"""Which rollout server gets a request: the one with the fewest sequences outstanding.

Only servers that hold the asked version and are not cooling down after a failure are
considered. A server that failed is left alone for a time that doubles with each failure;
the first request after that is its trial.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from areal_lora.errors import RolloutError
from areal_lora.types import AdapterRef

COOL_DOWN_S = 0.25
MAX_COOL_DOWN_S = 10.0


class VersionRetired(RolloutError):
    """No server holds the asked adapter version any more (or yet)."""


@dataclass(slots=True)
class Server:
    """One replica as the router sees it."""

    url: str
    outstanding: int = 0
    failures: int = 0
    down_until_s: float = 0.0
    versions: set[AdapterRef] = field(default_factory=set)


class Router:
    """Chooses servers and remembers what they hold and how they fare."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.servers = [Server(url) for url in urls]
        self._clock = clock

    def announce(self, ref: AdapterRef) -> None:
        """Every server has acknowledged ``ref``: a publish is complete only then (contract C3)."""
        for server in self.servers:
            server.versions.add(ref)

    def retired(self, server: Server, ref: AdapterRef) -> None:
        server.versions.discard(ref)

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
    async def lease(self, ref: AdapterRef, sequences: int) -> AsyncIterator[Server]:
        """A server for ``sequences`` sequences of ``ref``; waits while all that hold it cool down.

        Raises VersionRetired if none holds it.
        """
        server = await self._choose(ref)
        server.outstanding += sequences
        try:
            yield server
        finally:
            server.outstanding -= sequences

    async def _choose(self, ref: AdapterRef) -> Server:
        while True:
            holders = [server for server in self.servers if ref in server.versions]
            if not holders:
                raise VersionRetired(f"no rollout server holds {ref}")
            now = self._clock()
            healthy = [server for server in holders if now >= server.down_until_s]
            if healthy:
                return min(healthy, key=lambda server: server.outstanding)
            await asyncio.sleep(max(0.01, min(server.down_until_s for server in holders) - now))

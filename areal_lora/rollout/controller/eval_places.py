"""The places that evaluations may take on the servers: one pool for all adapters.

Half of what the servers take belongs to training rollouts, and seven eighths while the trainer waits for a batch. The
evaluations in progress divide the rest equally; one alone has all of it. Each may always have one request in progress,
however large: an evaluation that waited for the others would lose its version meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

GIVES_WAY = 4
"""The part of their places that evaluations keep while the trainer waits: one in so many. Not none: a trainer that is
faster than its servers waits at every step."""


class EvalPlaces:
    """``sequences`` that evaluations may have at once; see `resize`."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._trainer_waits = False
        self._shares: list[Share] = []

    @property
    def each(self) -> int:
        """Sequences of each evaluation in progress."""
        sequences = self._sequences // GIVES_WAY if self._trainer_waits else self._sequences
        return sequences // max(1, len(self._shares))

    def trainer_waits(self, waits: bool) -> None:
        """Whether the trainer waits for a batch of rollouts. Requests in progress are not cut off."""
        self._trainer_waits = waits
        self._admit()

    def resize(self, sequences: int) -> None:
        """The servers have changed. Requests in progress are not cut off."""
        self._sequences = sequences
        self._admit()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """The part of one evaluation, while it is in progress."""
        share = Share(self)
        self._shares.append(share)
        try:
            yield share
        finally:
            self._shares.remove(share)
            self._admit()

    def _admit(self) -> None:
        for share in self._shares:
            share.admit()


class Share:
    """Requests of one evaluation, admitted in the order in which they were made."""

    def __init__(self, places: EvalPlaces) -> None:
        self._places = places
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, sequences: int) -> AsyncIterator[None]:
        """Wait for the places of one request."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((sequences, turn))
        self.admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():  # else it has taken none: it was cut off while it waited
                self._taken -= sequences
            self.admit()

    def admit(self) -> None:
        """Begin what has a place now."""
        while self._waiting:
            sequences, turn = self._waiting[0]
            if not turn.cancelled():
                if self._taken and self._taken + sequences > self._places.each:
                    return
                self._taken += sequences
                turn.set_result(None)
            self._waiting.popleft()

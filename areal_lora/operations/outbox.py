"""The service's side of ordered delivery: sends rank 0 what is due of each adapter, hands on what arrives.

Expects n              -> everything from n on is sent, at most `AHEAD` operations before their outcomes
OperationCompletion n  -> it is stored, then acknowledged
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from areal_lora.operations.link import ServiceEnd
from areal_lora.operations.protocol import Acknowledgement, Expects, Operation, OperationCompletion, Outcome, ToService
from areal_lora.processes.faults import reached
from areal_lora.run_folder.paths import RunFolder

AHEAD = 16
"""Operations that an adapter is sent ahead of their outcomes."""


@dataclass(slots=True)
class _Position:
    """``next`` is the number to send next, ``completed`` the newest one with an outcome."""

    next: int
    completed: int


class SendWindows:
    """Which numbers of each adapter are to be sent now, over one connection to rank 0 after another. Pure.

    Starts where the trainer `Expects`; nothing is sent of an adapter that it has not named since the last one.
    """

    def __init__(self) -> None:
        self._positions: dict[str, _Position] = {}

    def expected(self, adapter: str, number: int) -> None:
        self._positions[adapter] = _Position(number, number - 1)

    def closed(self, adapter: str) -> None:
        self._positions.pop(adapter, None)

    def completed(self, adapter: str, number: int) -> None:
        """The trainer has carried out ``number``, on whichever connection that was sent."""
        if (at := self._positions.get(adapter)) is not None:
            at.completed = max(at.completed, number)
            at.next = max(at.next, number + 1)

    def due(self, adapter: str) -> tuple[int, int] | None:
        """The number from which on operations may be sent, and how many; None for none."""
        at = self._positions.get(adapter)
        if at is None or (limit := AHEAD - (at.next - 1 - at.completed)) <= 0:
            return None
        return at.next, limit

    def sends(self, adapter: str, number: int) -> bool:
        """Whether ``number`` is still what is to be sent next; it then counts as sent."""
        at = self._positions.get(adapter)
        if at is None or at.next != number:
            return False  # the trainer was restarted meanwhile
        at.next += 1
        return True


class OperationSource(Protocol):
    """Where operations come from and outcomes go to. What a call has done is durable when it returns."""

    async def expected(self, adapter: str, number: int) -> bool: ...

    async def completed(self, adapter: str, number: int, outcome: Outcome) -> None: ...

    async def to_send(self, adapter: str, start: int, limit: int) -> list[Operation]: ...


class Outbox:
    """``run``, ``receive`` and ``pump`` are tasks. ``moved`` reports that an adapter has new operations."""

    def __init__(self, run_folder: RunFolder, queue: OperationSource) -> None:
        self._queue, self._windows = queue, SendWindows()
        self._incoming: asyncio.Queue[ToService] = asyncio.Queue()
        self._link = ServiceEnd(run_folder, self._incoming.put_nowait)
        self._due: set[str] = set()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        await self._link.run()

    def moved(self, adapter: str) -> None:
        self._due.add(adapter)
        self._wake.set()

    async def receive(self) -> None:
        """Take messages in their order."""
        while True:
            match await self._incoming.get():
                case OperationCompletion(adapter=adapter, number=number, outcome=outcome):
                    await self._queue.completed(adapter, number, outcome)
                    reached("queue.acknowledging")
                    await self._link.send(Acknowledgement(adapter=adapter, number=number))
                    self._windows.completed(adapter, number)
                    self.moved(adapter)
                case Expects(adapter=adapter, number=number):
                    self._windows.closed(adapter)
                    if await self._queue.expected(adapter, number):
                        self._windows.expected(adapter, number)
                        self.moved(adapter)

    async def pump(self) -> None:
        """Send what is due."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            due, self._due = self._due, set()
            for adapter in sorted(due):
                if (window := self._windows.due(adapter)) is not None:
                    for operation in await self._queue.to_send(adapter, *window):
                        if not self._windows.sends(adapter, operation.number):
                            break
                        reached("queue.sending")
                        await self._link.send(operation)

"""The connection to rank 0: sends what is due of each adapter, hands on what comes.

Expects n    -> everything from n on is sent, at most `AHEAD` operations before their outcomes
Completed n  -> it is stored, then acknowledged
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from areal_lora.operations.link import ServiceEnd
from areal_lora.operations.messages import Acknowledged, Completed, Expects, Operation, Outcome, ToService
from areal_lora.processes.faults import reached
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.desk.lines import Lines


class Post(Protocol):
    """Where operations come from and outcomes go to. What a call has done is durable when it returns."""

    async def expected(self, adapter: str, number: int) -> bool: ...

    async def completed(self, adapter: str, number: int, outcome: Outcome) -> None: ...

    async def to_send(self, adapter: str, begin: int, most: int) -> list[Operation]: ...


class Courier:
    """``run``, ``receive`` and ``pump`` are tasks. ``moved`` says that an adapter has new operations."""

    def __init__(self, run_folder: RunFolder, post: Post) -> None:
        self._post, self._lines = post, Lines()
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
        """Take what comes, in its order."""
        while True:
            match await self._incoming.get():
                case Completed(adapter=adapter, number=number, outcome=outcome):
                    await self._post.completed(adapter, number, outcome)
                    reached("desk.acknowledging")
                    await self._link.send(Acknowledged(adapter=adapter, number=number))
                    self._lines.heard(adapter, number)
                    self.moved(adapter)
                case Expects(adapter=adapter, number=number):
                    self._lines.closed(adapter)
                    if await self._post.expected(adapter, number):
                        self._lines.expected(adapter, number)
                        self.moved(adapter)

    async def pump(self) -> None:
        """Send what is due."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            due, self._due = self._due, set()
            for adapter in sorted(due):
                if (found := self._lines.due(adapter)) is not None:
                    for operation in await self._post.to_send(adapter, *found):
                        if not self._lines.sends(adapter, operation.number):
                            break
                        reached("desk.sending")
                        await self._link.send(operation)

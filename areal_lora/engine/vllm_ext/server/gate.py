"""Hold requests back while the weights of a merged server change."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areal_lora.errors import PublishError, UnknownVersionError


@dataclass(slots=True, eq=False)
class _Inside:
    task: asyncio.Task[Any] | None
    pinned: bool
    ended: str = ""  # why the request was ended from outside


class Gate:
    """Holds requests back while a server's weights change (merged rollouts). Call it from one event loop only::

        open     requests enter and leave; each is on the one version that the weights are
        closing  none enters; those inside end: rollouts are cut, pinned requests fail with the reason
        closed   none is inside: the weights may change

    What waits at the gate starts on the next version. So no step of the model, and no cached block, mixes two versions.
    """

    def __init__(self) -> None:
        self._open, self._left = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._inside: set[_Inside] = set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def opened(self) -> None:
        """Wait until requests may enter. Enter before the next ``await``."""
        await self._open.wait()

    @contextlib.contextmanager
    def inside(self, *, pinned: bool) -> Iterator[None]:
        """Count a request in. Raises PublishError where the caller did not wait, UnknownVersionError if it is ended."""
        if not self.is_open:
            raise PublishError("the weights of this server are being replaced; try again")
        request = _Inside(asyncio.current_task() if pinned else None, pinned)
        self._inside.add(request)
        try:
            yield
        except asyncio.CancelledError:
            if not request.ended or request.task is None:
                raise
            request.task.uncancel()
            raise UnknownVersionError(request.ended) from None
        finally:
            self._inside.discard(request)
            self._left.set()

    @property
    def holds_pinned(self) -> bool:
        return any(request.pinned for request in self._inside)

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let no request enter meanwhile."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def end_pinned(self, reason: str) -> int:
        """End the pinned requests inside, and return how many."""
        ended = [request for request in self._inside if request.pinned and request.task is not None]
        for request in ended:
            request.ended = reason
            assert request.task is not None
            request.task.cancel()
        return len(ended)

    async def empty(self, timeout_s: float) -> bool:
        """Wait until no request is inside; False if one is, after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._inside:
                    self._left.clear()
                    await self._left.wait()
        return not self._inside

"""Answers that are sent piece by piece, within time limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from areal_lora.processes.log import get_logger

STALL_S, STREAM_S = 60.0, 3600.0
"""A stream ends if its client reads nothing for so long, and at the latest: it holds a version on its server, or files.
"""

log = get_logger(__name__)


class Stream(StreamingResponse):
    """``pieces`` within the time limits; closes ``held`` at the end, also where the client has disconnected."""

    def __init__(
        self, pieces: AsyncIterator[bytes], held: ExitStack, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        with self._held:
            try:
                async with asyncio.timeout(STREAM_S):
                    await super().__call__(scope, receive, in_time)
            except TimeoutError:
                log.warning("a stream has ended: its client did not read it in time")

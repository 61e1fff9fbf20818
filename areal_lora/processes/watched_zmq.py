"""zmq's check of client keys (ZAP) for asyncio, in a task whose death ends the process."""

from __future__ import annotations

import zmq
import zmq.asyncio
from zmq.auth import Authenticator

from areal_lora.processes.watched import watched_task


class WatchedAuthenticator(Authenticator):
    """In place of ``zmq.auth.asyncio.AsyncioAuthenticator``, whose task nobody looks at.

    Without it no client could connect any more.
    """

    def start(self) -> None:
        super().start()
        self._task = watched_task("zmq-keys", self._answer)

    async def _answer(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self.zap_socket, zmq.POLLIN)
        while True:
            if await poller.poll():
                await self.handle_zap_message(self.zap_socket.recv_multipart())

    def stop(self) -> None:
        self._task.cancel()
        super().stop()

"""Run zmq's authentication of client keys (ZAP) as a watched asyncio task."""

from __future__ import annotations

import zmq
import zmq.asyncio
from zmq.auth import Authenticator

from areal_lora.processes.watched import watched_task


class WatchedAuthenticator(Authenticator):
    """Replaces ``zmq.auth.asyncio.AsyncioAuthenticator``, whose task is not watched.

    If the task ended silently, no client could connect.
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

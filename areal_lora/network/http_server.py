"""An ASGI app on a socket that its process has bound, inside the process's own event loop."""

from __future__ import annotations

import contextlib
import socket
import ssl

import uvicorn
from starlette.types import ASGIApp

CLOSE_S = 2  # for running requests at a stop; uvicorn takes whole seconds


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: other parts of the process share its event loop."""

    def __init__(self, app: ASGIApp, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=CLOSE_S,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )
        # Connections inherit it; asyncio sets it only where the socket names its protocol. Without it the body of an
        # answer waits 40 ms for the client to acknowledge the headers.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve([self._sock])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Abort idle TLS connections: otherwise each would wait for its client to close it, too."""
        for connection in list(self.server_state.connections):
            connection.shutdown()
            transport = connection.transport
            if transport is not None and transport.is_closing() and not transport.get_write_buffer_size():
                transport.abort()
        await super().shutdown(sockets)

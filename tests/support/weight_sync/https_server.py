"""An HTTPS server in threads, for answers of the admin plane."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from areal_lora.network.tls import Plane, server_context
from areal_lora.weight_sync import messages as tp

Answering = Callable[[str, str, str | None, bytes], tuple[int, bytes]]
"""``(method, path, Authorization header, body) -> (status, body)``; called in the thread of the connection."""


class AdminHttpsServer(ThreadingHTTPServer):
    """Serve TLS on a listening socket. The thread of each connection makes the handshake."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, secret: str, answer: Answering) -> None:
        host, port = listener.getsockname()[:2]
        super().__init__((host, port), AdminRequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_port = listener, port
        self.answer = answer
        self._tls = server_context(secret, Plane.ADMIN, host)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, peer = super().get_request()
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), peer

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent: the client speaks no TLS, or has disconnected."""


class AdminRequestHandler(BaseHTTPRequestHandler):
    """Answer the requests of one connection."""

    server: AdminHttpsServer
    protocol_version = "HTTP/1.1"  # keep connections open, as vLLM's server does
    disable_nagle_algorithm = True  # an answer is two packets: the second would wait 40 ms for an acknowledgement

    def do_GET(self) -> None:
        self._respond("GET")

    def do_POST(self) -> None:
        self._respond("POST")

    def _respond(self, method: str) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if length > tp.MAX_BODY_BYTES:
            self.close_connection = True
            status, answer = 413, b"body too long"
        else:
            body = self.rfile.read(length)
            status, answer = self.server.answer(method, self.path, self.headers.get("Authorization"), body)
        with contextlib.suppress(OSError):  # the client has stopped waiting
            self.send_response(status)
            self.send_header("Content-Type", tp.CONTENT_TYPE)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent: tests read answers, not access logs."""

"""The HTTP server of all planes."""

from __future__ import annotations

import socket

from starlette.applications import Starlette

from areal_lora.network.http_server import HttpServer


def test_no_answer_waits_for_an_acknowledgement_of_its_headers() -> None:
    """A socket without a named protocol is what the service and the servers bind."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        HttpServer(Starlette(), sock, None)
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

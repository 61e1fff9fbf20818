"""Which requests take the proxy of the environment."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from areal_lora.cli.adapters import open_url

ANSWER = b"HTTP/1.0 200 OK\r\nContent-Length: 6\r\n\r\nanswer"


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers everything, which is the proxy of the environment too; its port, the first lines it got."""
    lines: list[bytes] = []

    def answer() -> None:
        """The first request; a connection without one is of a test that tries a port which was its own."""
        while not lines:
            with listener.accept()[0] as client, contextlib.suppress(OSError):
                client.settimeout(10.0)
                request = b""
                while not request.endswith(b"\r\n\r\n") and (more := client.recv(65536)):
                    request += more
                if request.startswith(b"GET "):
                    lines.append(request.partition(b"\r\n")[0])
                    client.sendall(ANSWER)
                    client.shutdown(socket.SHUT_WR)
                    client.recv(1)  # what is closed with unread bytes is reset

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        thread = threading.Thread(target=answer)
        thread.start()
        yield port, lines
        thread.join()


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("http://127.0.0.1:{}/v1", b"GET /v1 HTTP/1.1"),
        ("http://localhost:{}/v1", b"GET /v1 HTTP/1.1"),
        ("http://service.example/v1", b"GET http://service.example/v1 HTTP/1.1"),
    ],
)
def test_a_proxy_gets_no_request_for_this_machine(url: str, line: bytes, proxied: tuple[int, list[bytes]]) -> None:
    port, lines = proxied
    with open_url(urllib.request.Request(url.format(port)), 120.0) as answer:
        assert answer.read() == b"answer"
    assert lines == [line]

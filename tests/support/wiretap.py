"""A TCP proxy on loopback that records what crosses it: what an eavesdropper would see, and could send again."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator


class Wiretap:
    """Forwards connections to ``target`` and keeps the bytes. Use as a context manager; connect to ``port``."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.sent: list[bytearray] = []  # by connection: client -> server
        self.received: list[bytearray] = []

    def __enter__(self) -> Wiretap:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def everything(self) -> bytes:
        return b"".join([*map(bytes, self.sent), *map(bytes, self.received)])

    def replay(self, connection: int = 0, silence_s: float = 1.0) -> bytes:
        """Send a recorded connection's bytes to the target again; what it answers until it closes or is silent."""
        with socket.create_connection(self._target, timeout=silence_s) as again:
            answer = b""
            with contextlib.suppress(OSError):
                again.sendall(self.sent[connection])
                while part := again.recv(65536):
                    answer += part
            return answer

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        sent, received = bytearray(), bytearray()
        self.sent.append(sent)
        self.received.append(received)
        with client, socket.create_connection(self._target) as server:
            for source, part in _parts(client, server):
                (sent if source is client else received).extend(part)
                (server if source is client else client).sendall(part)


def _parts(one: socket.socket, other: socket.socket) -> Iterator[tuple[socket.socket, bytes]]:
    """What arrives at either socket, until one of them is closed."""
    with contextlib.suppress(OSError):
        while True:
            for source in select.select([one, other], [], [])[0]:
                part = source.recv(65536)
                if not part:
                    return
                yield source, part

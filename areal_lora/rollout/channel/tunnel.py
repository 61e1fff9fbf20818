"""Connections to ports of this host over the messages of a process on another one, which no port can reach."""

import asyncio
import contextlib
from collections.abc import Callable, Container, Coroutine
from typing import Any

import msgspec

HOST = "127.0.0.1"


class StreamBytes(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="bytes"):
    """Bytes of connection ``stream`` to ``port``, in either direction; none at its end, and in the first message.

    Connections are opened in the order of their numbers.
    """

    stream: int
    data: bytes
    port: int = 0


class Tunnel:
    """Opens a connection to its port, if that is among ``ports``, for each one that the other process has accepted."""

    def __init__(self, send: Callable[[StreamBytes], None], ports: Container[int]) -> None:
        self._send, self._ports, self._queues = send, ports, dict[int, asyncio.Queue[bytes]]()
        self._tasks, self._newest = set[asyncio.Task[None]](), -1

    def receive(self, received: StreamBytes) -> None:
        if received.stream > self._newest:
            self._newest = received.stream
            self._queues[received.stream] = asyncio.Queue()
            self._start(self._connected(received.stream, received.port))
        elif received.stream in self._queues:  # else it has ended, here before there
            self._queues[received.stream].put_nowait(received.data)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, stream: int, port: int) -> None:
        """Send what arrives for the connection, until either side ends it."""
        queue = self._queues[stream]
        try:
            reader, writer = await asyncio.open_connection(HOST, port if port in self._ports else 0)
        except OSError:
            self._send(StreamBytes(stream=stream, data=b""))
        else:
            self._start(self._pumped(stream, reader))
            with contextlib.suppress(OSError), contextlib.closing(writer):
                while data := await queue.get():
                    writer.write(data)
                    await writer.drain()
        del self._queues[stream]

    async def _pumped(self, stream: int, reader: asyncio.StreamReader) -> None:
        """Pass on what the endpoint answers."""
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self._send(StreamBytes(stream=stream, data=data))
        self._send(StreamBytes(stream=stream, data=b""))
        if stream in self._queues:
            self._queues[stream].put_nowait(b"")

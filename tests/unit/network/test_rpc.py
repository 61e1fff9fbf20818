"""Requests over CURVE: replies, and every way in which a connection ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from areal_lora.errors import EnvironmentError_
from areal_lora.network import rpc
from areal_lora.network.rpc import Connection, ConnectionLost, Listener, RpcServer, Subscription, Wire
from areal_lora.rollout.channel import channel_messages
from tests.support.clocks import wait_until

SECRET = "5e" * 32
WIRE = Wire(server="server", client="client", max_request_bytes=1000, max_reply_bytes=1000)
IN_PARTS = Wire(server="server", client="client", max_request_bytes=1000, max_reply_bytes=2 * rpc.PART_BYTES)


class Echo:
    """Answers every request with its payload, but b"no" and, before the request that follows it, b"later"."""

    def __init__(self, host: str = "127.0.0.1", lost: Callable[[bytes], None] | None = None) -> None:
        self._later: tuple[bytes, bytes, bytes] | None = None
        self.clients = list[bytes]()
        self.server = RpcServer(host, SECRET, WIRE, self._take, lost=lost)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def _take(self, client: bytes, *frames: bytes) -> None:
        number, payload = (frames[0], frames[-1])
        self.clients.append(client)
        if self._later is not None:
            self.server.send(*self._later)
            self._later = None
        if payload == b"later":
            self._later = (client, number, payload)
        elif payload != b"no":
            self.server.send(client, number, payload)

    def close(self) -> None:
        self.server.close()
        self.thread.join(120)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_a_late_reply_is_not_taken_for_that_of_the_next_request(echo, context) -> None:
    connection = Connection(context, "127.0.0.1", echo.server.port, SECRET, WIRE)
    assert connection.exchange(b"one", 120.0) == b"one"
    with pytest.raises(ConnectionLost, match="did not answer within 0 s") as lost:
        connection.exchange(b"later", 0.2)
    assert lost.value.late
    assert connection.exchange(b"two", 120.0) == b"two"
    connection.close()


def test_a_reply_that_arrives_with_the_end_of_the_connection_is_taken(context) -> None:
    """A controller ends right after its reply to a Shutdown: the end may be seen first, the reply counts."""
    listening = threading.Event()

    async def serve() -> None:
        listener = Listener("127.0.0.1", SECRET, WIRE)
        ports.append(listener.port)
        listening.set()
        await listener.socket.send_multipart(await listener.socket.recv_multipart())
        listener.close(linger_s=120.0)

    class MonitorFirst:
        """What a look at the socket just before both arrive gives: the reply is there, and was not seen."""

        def poll(self, timeout_ms: int) -> list[tuple[Any, int]]:
            thread.join(120)
            return [(connection._monitor, zmq.POLLIN)] if connection._monitor.poll(120_000) else []

    ports: list[int] = []
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert listening.wait(120)
    connection = Connection(context, "127.0.0.1", ports[0], SECRET, WIRE)
    while not connection.ready:
        connection._note(connection._monitor.recv_multipart())
    connection._poller = MonitorFirst()  # type: ignore[assignment]
    assert connection.exchange(b"one", 120.0) == b"one"
    connection.close()


@pytest.mark.parametrize("wire", [IN_PARTS, channel_messages.WIRE], ids=["any", "channel"])
def test_a_long_reply_arrives_whole_and_parts_of_an_abandoned_one_do_not_get_into_the_next(context, wire: Wire) -> None:
    long = bytes(range(256)) * 4096  # four parts
    asked, ports = threading.Event(), list[int]()

    async def serve() -> None:
        listener = Listener("127.0.0.1", SECRET, wire)
        ports.append(listener.port)
        asked.set()
        client, late, _ = await listener.socket.recv_multipart()
        _, number, _ = await listener.socket.recv_multipart()
        await listener.reply(client, late, b"?" * len(long))
        await listener.reply(client, number, long)
        for payload in (b"", long[1:]):
            _, number, _ = await listener.socket.recv_multipart()
            await listener.reply(client, number, payload)
        listener.close(linger_s=120.0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert asked.wait(120)
    connection = Connection(context, "127.0.0.1", ports[0], SECRET, wire)
    with pytest.raises(ConnectionLost, match="did not answer"):
        connection.exchange(b"one", 0.1)
    assert connection.exchange(b"two", 120.0) == long
    assert connection.exchange(b"three", 120.0) == b""
    assert connection.exchange(b"four", 120.0) == long[1:]
    connection.close()
    thread.join(120)


def test_each_part_of_a_reply_has_the_whole_time_limit(context, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which a part takes two thirds of it."""
    long, ports, bound, now = bytes(4 * rpc.PART_BYTES), list[int](), threading.Event(), [0.0]

    async def serve() -> None:
        listener = Listener("127.0.0.1", SECRET, IN_PARTS)
        ports.append(listener.port)
        bound.set()
        client, number, _ = await listener.socket.recv_multipart()
        await listener.reply(client, number, long)
        listener.close(linger_s=120.0)

    class Slow:
        def poll(self, timeout_ms: int) -> list[tuple[Any, int]]:
            if connection._socket.poll(120_000):
                now[0] += 80.0
            return [(connection._socket, zmq.POLLIN)]

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert bound.wait(120)
    connection = Connection(context, "127.0.0.1", ports[0], SECRET, IN_PARTS)
    connection._poller = Slow()  # type: ignore[assignment]
    monkeypatch.setattr(rpc, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert connection.exchange(b"one", 120.0) == long
    assert now == [320.0]
    connection.close()
    thread.join(120)


def test_a_server_that_ends_is_noticed_while_waiting_and_afterwards(echo, context) -> None:
    connection, idle = (Connection(context, "127.0.0.1", echo.server.port, SECRET, WIRE) for _ in range(2))
    assert idle.exchange(b"one", 120.0) == b"one"
    assert connection.exchange(b"one", 120.0) == b"one"
    assert idle.usable()
    threading.Timer(0.2, echo.server.close).start()
    with pytest.raises(ConnectionLost, match="closed the connection"):
        connection.exchange(b"no", 120.0)
    with pytest.raises(ConnectionLost, match="closed the connection"):
        idle.exchange(b"no", 120.0)
    connection.close()
    idle.close()
    another = Connection(context, "127.0.0.1", echo.server.port, SECRET, WIRE)
    with pytest.raises(ConnectionLost, match="refused the connection") as lost:
        another.exchange(b"no", 120.0)
    assert not lost.value.refused, "the key was not at fault"
    another.close()


def test_a_server_learns_of_a_client_that_has_ended_and_others_ignore_what_they_did_not_expect(context) -> None:
    lost: list[bytes] = []
    echo = Echo(lost=lost.append)
    connections = [Connection(context, "127.0.0.1", echo.server.port, SECRET, WIRE) for _ in range(2)]
    for connection in connections:
        assert connection.exchange(b"x", 60) == b"x"
    connections[0].close()

    def ping() -> bool:
        for client in echo.clients:
            echo.server.send(client, bytes(8), b"")
        return lost != []

    wait_until(ping)
    assert set(lost) == {echo.clients[0]}
    assert connections[1].exchange(b"y", 60) == b"y"
    connections[1].close()
    echo.close()


def test_an_endpoint_that_moved_ends_the_wait(echo, context) -> None:
    connection = Connection(context, "127.0.0.1", echo.server.port, SECRET, WIRE)
    assert connection.exchange(b"one", 120.0) == b"one"
    with pytest.raises(ConnectionLost, match="left tcp"):
        connection.exchange(b"no", 120.0, lambda: True)
    connection.close()


def test_another_secret_is_refused_as_such(echo, context) -> None:
    for _ in range(3):
        connection = Connection(context, "127.0.0.1", echo.server.port, "5f" * 32, WIRE)
        with pytest.raises(ConnectionLost, match="refused the handshake") as lost:
            connection.exchange(b"one", 120.0)
        assert lost.value.refused
        connection.close()


def test_an_address_of_another_machine_is_an_error_at_once() -> None:
    elsewhere = Echo("192.0.2.1")
    with pytest.raises(EnvironmentError_, match="no port can be bound"):
        elsewhere.server.port  # noqa: B018
    elsewhere.thread.join(120)


def test_what_a_subscription_sends_after_the_end_of_its_server_is_lost(echo) -> None:
    """It must neither wait for ever nor fail: the next connection greets, and the other end states what it expects."""

    async def run() -> None:
        context = zmq.asyncio.Context()
        subscription = Subscription(context, "127.0.0.1", echo.server.port, SECRET, WIRE)
        with pytest.raises(ConnectionLost, match="closed the connection"):
            async with asyncio.timeout(120):
                await subscription.run(lambda: b"hello", lambda _: None, echo_ends)
        async with asyncio.timeout(120):
            await subscription.send(b"lost")
        subscription.close()
        context.destroy(linger=0)

    def echo_ends() -> bool:
        echo.server.close()
        return False

    asyncio.run(run())

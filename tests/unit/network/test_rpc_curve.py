"""Listening zmq sockets: the run's one client key, and messages within the limit."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from areal_lora.distributed import store
from areal_lora.engine.vllm_ext.worker import channel as worker
from areal_lora.network.rpc import HANDSHAKE_REFUSED, Listener, Wire, connect_curve, only_key_of, serve_curve
from areal_lora.operations import link
from areal_lora.rollout.channel import channel_messages

SECRET, LIMIT = "5e" * 32, 1000


@pytest.fixture
def server() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    context = zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=only_key_of(SECRET, "client"))
    listening = context.socket(zmq.PULL)
    serve_curve(listening, SECRET, "server", LIMIT)
    listening.bind("tcp://127.0.0.1:0")
    listening.rcvtimeo = 120_000
    yield listening, listening.getsockopt_string(zmq.LAST_ENDPOINT)
    listening.close(linger=0)
    authenticator.stop()
    context.term()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made.linger = 0
    yield made
    made.destroy()


def test_the_client_of_the_run_is_heard(server, context) -> None:
    client = context.socket(zmq.PUSH)
    connect_curve(client, SECRET, "client", "server", LIMIT)
    client.connect(server[1])
    client.send(b"x" * (LIMIT - 33))  # CURVE adds so much to a message
    assert server[0].recv() == b"x" * (LIMIT - 33)


def test_a_message_beyond_the_limit_is_dropped_with_its_connection(server, context) -> None:
    client = context.socket(zmq.PUSH)
    connect_curve(client, SECRET, "client", "server", LIMIT)
    lost = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.connect(server[1])
    client.send(b"x" * (LIMIT + 1))
    assert lost.poll(120_000)
    server[0].rcvtimeo = 300
    with pytest.raises(zmq.Again):
        server[0].recv()


def taken_in(port: int, announced: int) -> bytes:
    """What a socket says to a client without a key, until it drops it for the length of a command."""
    with socket.create_connection(("127.0.0.1", port), timeout=25) as raw:
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
        greeting = b""
        with suppress(ConnectionError):  # as it is dropped; the time-out, before that of a handshake, would raise
            raw.sendall(b"\x06" + struct.pack(">Q", announced) + bytes(4096))
            while part := raw.recv(4096):
                greeting += part
    return greeting


def test_without_a_handshake_nothing_long_is_taken_in(server) -> None:
    assert len(taken_in(int(server[1].rpartition(":")[2]), 1 << 30)) <= 64


@pytest.mark.parametrize("wire", [channel_messages.WIRE, link.WIRE, worker.WIRE, store.WIRE], ids=lambda w: w.server)
def test_no_socket_of_a_run_takes_in_a_long_command_without_a_handshake(wire: Wire) -> None:
    listener, started = list[Listener](), threading.Event()

    async def serve() -> None:
        listener.append(Listener("127.0.0.1", SECRET, wire))
        started.set()
        await asyncio.to_thread(ended.wait, 600)
        listener[0].close()

    ended = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(120)
        assert len(taken_in(listener[0].port, (16 << 20) + 1)) <= 64
    finally:
        ended.set()
        thread.join(120)


@pytest.mark.parametrize(
    ("secret", "role"), [("5f" * 32, "client"), (SECRET, "server"), (SECRET, "else")], ids=["run", "server", "role"]
)
def test_another_key_is_refused_and_the_monitor_tells(server, context, secret: str, role: str) -> None:
    refused = server[0].get_monitor_socket(HANDSHAKE_REFUSED)
    client = context.socket(zmq.PUSH)
    connect_curve(client, secret, role, "server", LIMIT)
    client.connect(server[1])
    client.send(b"let me in", zmq.NOBLOCK)
    assert refused.poll(120_000)
    server[0].rcvtimeo = 300
    with pytest.raises(zmq.Again):
        server[0].recv()
    server[0].disable_monitor()
    refused.close(linger=0)

"""Listening zmq sockets: the run's one client key, and messages within the limit."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from areal_lora.network.rpc import HANDSHAKE_REFUSED, connect_curve, only_key_of, serve_curve

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


def test_without_a_handshake_nothing_long_is_taken_in(server) -> None:
    host, port = server[1].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=25) as raw:
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
        raw.sendall(b"\x06" + struct.pack(">Q", 1 << 30) + bytes(4096))  # a long command of a GiB
        greeting = b""
        while part := raw.recv(4096):  # ends with the connection; the time-out, before that of a handshake, would raise
            greeting += part
    assert len(greeting) <= 64


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

"""CURVE for the listening zmq sockets of a run: one key may connect, and messages have a limit."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils import z85

from areal_lora.network.keys import derived_key

HANDSHAKE_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Monitor events of a wrong key, the only sign of it on either side."""


def zmq_curve_keys(secret: str, role: str) -> tuple[bytes, bytes]:
    """The CURVE key pair ``(public, secret)``, z85 bytes, of ``role`` in this run.

    Derived from the run secret under the role's label (``network.keys``), so each side knows the
    other's public key without sending anything.
    """
    private = z85.encode(derived_key(secret, f"curve {role}"))
    return zmq.curve_public(private), private


class OnlyKeyOf:
    """ZAP credentials: exactly the client key that the run secret gives ``role``."""

    def __init__(self, secret: str, role: str) -> None:
        self._key, _ = zmq_curve_keys(secret, role)

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def serve_curve(socket: zmq.Socket[Any], secret: str, role: str, max_bytes: int) -> None:
    """Before ``bind``: ``socket`` proves to be ``role`` and drops clients that send over ``max_bytes`` in a message.

    The limit also holds before the handshake, when any peer may announce a message of any length.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = zmq_curve_keys(secret, role)


def connect_curve(socket: zmq.Socket[Any], secret: str, role: str, server_role: str, max_bytes: int) -> None:
    """Before ``connect``: ``socket`` proves to be ``role`` and talks to ``server_role`` only."""
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.curve_serverkey, _ = zmq_curve_keys(secret, server_role)
    socket.curve_publickey, socket.curve_secretkey = zmq_curve_keys(secret, role)

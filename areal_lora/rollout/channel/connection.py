"""One connection to the controller: a zmq DEALER behind CURVE that notices when the other side is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from areal_lora.network.addresses import bracketed
from areal_lora.network.curve import HANDSHAKE_REFUSED, connect_curve
from areal_lora.rollout.channel.control import CLIENT_ROLE, MAX_REPLY_BYTES, SERVER_ROLE
from areal_lora.run_folder.rendezvous import Endpoint

LOOK_S = 0.25  # how often a waiting request looks whether the controller has moved


class ConnectionLost(Exception):
    """This connection can deliver no answer any more; ``refused`` if the handshake was."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        self.reason, self.refused = reason, refused
        super().__init__(reason)


class Connection:
    """Belongs to one thread. ``ready`` once the CURVE handshake has succeeded."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, secret: str) -> None:
        self.endpoint = endpoint
        self.address = f"tcp://{bracketed(endpoint.host)}:{endpoint.ports['control']}"
        self.ready = False
        self._next_id = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = ":" in endpoint.host
        connect_curve(self._socket, secret, CLIENT_ROLE, SERVER_ROLE, MAX_REPLY_BYTES)
        self._monitor = self._socket.get_monitor_socket(
            HANDSHAKE_REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(self.address)

    def exchange(self, payload: bytes, timeout_s: float, find_endpoint: Callable[[], Endpoint | None]) -> bytes:
        """Send and wait for the reply.

        Raises:
            ConnectionLost: the other side closed, refused the handshake, has another endpoint
                by now (read every ``LOOK_S``), or gave no answer in ``timeout_s``.
        """
        self._next_id += 1
        request_id = self._next_id.to_bytes(8, "little")
        self._socket.send_multipart([request_id, payload])
        deadline = time.monotonic() + timeout_s
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (remaining_s := deadline - time.monotonic()) > 0:
            readable = dict(poller.poll(int(min(remaining_s, LOOK_S) * 1000) + 1))
            if self._socket in readable:
                answered_id, reply = self._socket.recv_multipart()
                if answered_id == request_id:  # else: late answer to an abandoned request
                    return reply
            elif self._monitor in readable:
                self._watch()
            elif not readable and find_endpoint() not in (None, self.endpoint):
                raise ConnectionLost(f"left {self.address}")
        raise ConnectionLost(f"{self.address} did not answer within {timeout_s:.0f} s")

    def _watch(self) -> None:
        """Read the end of the handshake: a wrong key gets no other answer."""
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.ready = True
        elif event & HANDSHAKE_REFUSED or not self.ready:
            raise ConnectionLost(f"{self.address} refused the handshake", refused=True)
        else:
            raise ConnectionLost(f"{self.address} closed the connection")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

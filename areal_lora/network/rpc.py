"""Messages between processes of a run: zmq behind CURVE, with keys derived from the run secret.

    Listener, in an event loop    <-- ROUTER, one client key --   Connection, one thread: requests with their replies
    RpcServer, in its own thread                                  Subscription, in an event loop: messages both ways

A request is a number of 8 bytes and its payload, in frames, and its reply repeats the number. A long reply is several
messages, of which all but the last have another, empty frame: one part is encrypted while that before it is decrypted,
and neither needs new memory. Nothing reconnects below the caller: a connection whose other end is lost raises
`ConnectionLost`, the caller makes another one, greets, and repeats what the other end may not have. Requests are
therefore idempotent, and messages in order are numbered (`operations.link`).
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.auth import Authenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from areal_lora.errors import EnvironmentError_
from areal_lora.network.addresses import bracketed
from areal_lora.network.tls import derived_key
from areal_lora.processes.watched import watched_task

HANDSHAKE_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Monitor events of a wrong key, the only sign of it on either side."""


def zmq_curve_keys(secret: str, role: str) -> tuple[bytes, bytes]:
    """The CURVE key pair ``(public, secret)``, z85 bytes, of ``role`` in this run.

    Derived from the run secret under the role's label (``network.tls``), so each side knows the
    other's public key without sending anything.
    """
    private = z85.encode(derived_key(secret, f"curve {role}"))
    return zmq.curve_public(private), private


def only_key_of(secret: str, role: str) -> SimpleNamespace:
    """ZAP credentials: exactly the client key that the run secret gives ``role``."""
    known, _ = zmq_curve_keys(secret, role)
    return SimpleNamespace(callback=lambda domain, key: key == known)


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


LOOK_S = 0.25
"""How often a waiting client checks whether the other end has moved."""
START_S = 60.0
PART_BYTES = 1 << 18
FRAME_BYTES = 2 * PART_BYTES
"""Longest frame of a long message, with what CURVE adds: anyone can make a process hold one before the handshake."""
NEVER_MS = 3_600_000
"""To a reconnect, which the caller precedes; with none (-1) zmq drops unread replies where a connection ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """CURVE identities of the two ends, and how long one frame to each of them may be."""

    server: str
    client: str
    max_request_bytes: int
    max_reply_bytes: int


def parted(payload: bytes) -> list[memoryview]:
    """Frames of ``payload``, which zmq delivers all at once."""
    return [memoryview(payload)[at : at + PART_BYTES] for at in range(0, len(payload) or 1, PART_BYTES)]


class WatchedAuthenticator(Authenticator):
    """Checks client keys (ZAP) in a watched task, which ``zmq.auth.asyncio.AsyncioAuthenticator`` does not.

    If the task ended silently, no client could connect.
    """

    def start(self) -> None:
        super().start()
        self._task = watched_task("zmq-keys", self._answer)

    async def _answer(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self.zap_socket, zmq.POLLIN)
        while True:
            if await poller.poll():
                await self.handle_zap_message(self.zap_socket.recv_multipart())

    def stop(self) -> None:
        self._task.cancel()
        super().stop()


class Listener:
    """A ROUTER on exactly ``host`` and a ``port`` that the system chooses. Belongs to the running event loop.

    Raises zmq.ZMQError if ``host`` cannot be bound.
    """

    def __init__(self, host: str, secret: str, wire: Wire) -> None:
        self._host, self._secret, self._wire = host, secret, wire
        self._context = zmq.asyncio.Context()  # its own context, because zmq authenticates peers per context
        self._authenticator = WatchedAuthenticator(self._context)
        self._authenticator.start()  # before a socket is bound: none may accept a client without this check
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=only_key_of(secret, wire.client))
        self._sockets: list[zmq.asyncio.Socket] = []
        self._refusals: zmq.asyncio.Socket | None = None
        try:
            self.socket, self.port = self.bound(zmq.ROUTER)
        except zmq.ZMQError:
            self.close()
            raise

    def bound(self, kind: int) -> tuple[zmq.asyncio.Socket, int]:
        """Another socket for the same clients, and its port."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        serve_curve(socket, self._secret, self._wire.server, self._wire.max_request_bytes)
        socket.sndhwm = socket.rcvhwm = 0  # a ROUTER drops what is above it
        socket.ipv6 = ":" in self._host
        socket.bind(f"tcp://{bracketed(self._host)}:*")
        return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def reply(self, client: bytes, number: bytes, payload: bytes) -> None:
        """Answer request ``number`` of ``client``; lost if it is away."""
        *before, last = parted(payload)
        for part in before:
            await self.socket.send_multipart([client, number, part, b""], copy=False)
        await self.socket.send_multipart([client, number, last], copy=False)

    def watch_refusals(self) -> zmq.asyncio.Socket:
        """Readable once a client with another key was refused."""
        self._refusals = self.socket.get_monitor_socket(HANDSHAKE_REFUSED)
        return self._refusals

    def close(self, linger_s: float = 0.0) -> None:
        """Messages that were sent before leave within ``linger_s``."""
        if self._refusals is not None:
            self.socket.disable_monitor()
            self._refusals.close(linger=0)
        for socket in self._sockets:
            socket.close(linger=int(linger_s * 1000))
        self._authenticator.stop()
        self._context.term()


class RpcServer:
    """A `Listener` in the thread that calls `run`, where ``take(client, *frames)`` is called for every message.

    ``lost``, if given, is called there for a client that was sent something after its connection had ended.
    """

    def __init__(
        self,
        host: str,
        secret: str,
        wire: Wire,
        take: Callable[..., None],
        *,
        lost: Callable[[bytes], None] | None = None,
        linger_s: float = 0.0,
    ) -> None:
        self._host, self._secret, self._wire, self._linger_s = host, secret, wire, linger_s
        self._take, self._lost = take, lost
        self._port = Future[int]()
        self._stopped = threading.Event()

    @property
    def port(self) -> int:
        """Raises EnvironmentError_ if the address cannot be bound."""
        return self._port.result(START_S)

    def run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._serve())
        finally:
            self._stopped.set()

    async def _serve(self) -> None:
        try:
            listener = Listener(self._host, self._secret, self._wire)
        except zmq.ZMQError as error:
            problem = f"{self._host}: no port can be bound: {error.strerror} (fix: see cluster.bind)"
            self._port.set_exception(EnvironmentError_(problem))
            return
        self._loop, self._task, self._socket = asyncio.get_running_loop(), asyncio.current_task(), listener.socket
        listener.socket.router_mandatory = self._lost is not None
        self._port.set_result(listener.port)
        try:
            while True:
                self._take(*await listener.socket.recv_multipart())
        finally:
            listener.close(self._linger_s)

    def send(self, client: bytes, *frames: bytes | memoryview) -> None:
        """Lost if ``client`` is away. From any thread."""

        def deliver() -> None:
            if not self._socket.closed:
                sent = cast("asyncio.Future[object]", self._socket.send_multipart([client, *frames]))
                sent.add_done_callback(sent_to)

        def sent_to(done: "asyncio.Future[object]") -> None:
            if self._lost is not None and not done.cancelled() and done.exception() is not None:
                self._lost(client)

        with suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(deliver)

    def close(self) -> None:
        """Disconnect all clients, once what was sent before has left."""
        if not self._stopped.is_set():
            assert self._task is not None
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._stopped.wait(10)


class ConnectionLost(Exception):
    """No answer comes; ``refused`` if the handshake was. Unless ``late`` the connection must not be used again."""

    def __init__(self, reason: str, *, refused: bool = False, late: bool = False) -> None:
        self.reason, self.refused, self.late = reason, refused, late
        super().__init__(reason)


class _Dealer:
    """A socket and its monitor. ``ready`` once the handshake has succeeded."""

    def __init__(self, context: zmq.Context[Any], host: str, port: int, secret: str, wire: Wire) -> None:
        self.address = f"tcp://{bracketed(host)}:{port}"
        self.ready = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.reconnect_ivl = NEVER_MS
        self._socket.ipv6 = ":" in host
        connect_curve(self._socket, secret, wire.client, wire.server, wire.max_reply_bytes)
        self._monitor = self._socket.get_monitor_socket(
            HANDSHAKE_REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._socket.connect(self.address)

    def _note(self, frames: list[bytes]) -> None:
        """Read one event of the monitor; a wrong key gets no other answer. Raises ConnectionLost."""
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.ready = True
        elif event & HANDSHAKE_REFUSED or (event == zmq.EVENT_DISCONNECTED and not self.ready):
            raise ConnectionLost(f"{self.address} refused the handshake", refused=True)
        else:
            raise ConnectionLost(f"{self.address} {'closed' if self.ready else 'refused'} the connection")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class Connection(_Dealer):
    """Requests of one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, secret: str, wire: Wire) -> None:
        super().__init__(context, host, port, secret, wire)
        self._numbers = itertools.count(1)
        self._ended = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def exchange(self, payload: bytes, timeout_s: float, moved: Callable[[], bool] = lambda: False) -> bytearray:
        """Send, and wait for the reply.

        Raises:
            ConnectionLost: the other side closed, refused the handshake, ``moved`` to another endpoint
                (called every ``LOOK_S``), or sent no part of the reply for ``timeout_s``.
        """
        number = next(self._numbers).to_bytes(8, "little")
        try:
            self._socket.send_multipart([number, *parted(payload)], zmq.NOBLOCK)
        except zmq.Again:  # it has ended already, and the monitor has the reason
            while self._monitor.poll(1000):
                self._note(self._monitor.recv_multipart())
            raise ConnectionLost(f"{self.address} closed the connection") from None
        deadline, reply = time.monotonic() + timeout_s, bytearray()
        while (remaining_s := deadline - time.monotonic()) > 0:
            readable = dict(self._poller.poll(int(min(remaining_s, LOOK_S) * 1000) + 1))
            # A reply and the end of its connection may arrive between the looks at the socket and at the monitor.
            if self._socket in readable or (readable and self._socket.poll(0)):
                answered, part, *more = self._socket.recv_multipart(copy=False)
                if answered.bytes == number:  # else: late answer to an abandoned request
                    reply += part.buffer
                    deadline = time.monotonic() + timeout_s
                    if not more:
                        return reply
            elif self._monitor in readable:
                self._note(self._monitor.recv_multipart())
            elif moved():
                raise ConnectionLost(f"left {self.address}")
        raise ConnectionLost(f"{self.address} did not answer within {timeout_s:.0f} s", late=True)

    def usable(self) -> bool:
        """Whether the idle connection still stands; the event of its handshake may be unread."""
        try:
            while not self._ended and self._monitor.poll(0):
                self._note(self._monitor.recv_multipart())
        except ConnectionLost:
            self._ended = True
        return not self._ended


class Subscription(_Dealer):
    """Messages both ways, in an event loop: ``context`` is one of ``zmq.asyncio``."""

    async def run(self, greet: Callable[[], bytes], take: Callable[[bytes], None], moved: Callable[[], bool]) -> None:
        """Send what ``greet`` gives after the handshake, then ``take`` every message. Raises ConnectionLost."""
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            readable = dict(await poller.poll(int(LOOK_S * 1000)))
            if self._socket in readable or (readable and await self._socket.poll(0)):
                take(b"".join(await self._socket.recv_multipart()))
            elif self._monitor in readable:
                self._note(await self._monitor.recv_multipart())
                await self.send(greet())
            elif moved():
                raise ConnectionLost(f"left {self.address}")

    async def send(self, payload: bytes) -> None:
        """Lost if the other end has closed the connection."""
        with suppress(zmq.Again):  # with no limit to its queue a socket blocks only where nothing is connected
            await self._socket.send_multipart(parted(payload), zmq.NOBLOCK)

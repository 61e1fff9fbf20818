"""Both ends of the connection: rank 0 listens, the service connects, and connects again.

Rank 0 publishes its port as ``operations-0`` in the run folder. It is zmq behind CURVE, with keys derived from the run
secret. What is sent while the other end is away is lost; the service says `Hello` after every connect, and hears
what is expected.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from areal_lora.errors import EnvironmentError_
from areal_lora.network.addresses import bracketed
from areal_lora.network.curve import HANDSHAKE_REFUSED, OnlyKeyOf, connect_curve, serve_curve
from areal_lora.operations.messages import Hello, ToService, ToTrainer, decode_to_service, decode_to_trainer, encode
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task, watched_thread
from areal_lora.processes.watched_zmq import WatchedAuthenticator
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import Endpoint, publish_endpoint, read_endpoint, read_secret

ROLE = "operations"
TRAINER_KEY, SERVICE_KEY = "operations trainer", "operations service"
MAX_BYTES = 1 << 30
"""Of one message; the service limits what a client sends far below."""
LOOK_S = 0.25
"""How often the service looks whether rank 0 has moved."""

log = get_logger(__name__)


class TrainerEnd:
    """Rank 0's end, in a thread of its own. Every method may be called from any thread."""

    def __init__(self, run_folder: RunFolder, host: str = "127.0.0.1") -> None:
        self._received: deque[ToTrainer] = deque()
        self._changed = threading.Condition()
        self._started = threading.Event()
        self._run_folder, self._host = run_folder, host
        self._service = b""
        self._thread = watched_thread("operations", lambda: asyncio.run(self._serve()))
        if not self._started.wait(60):
            raise EnvironmentError_(f"{host}: no port for operations could be bound (fix: see the log)")

    def take(self, wait_s: float = 0.0) -> list[ToTrainer]:
        """What came since the last call, after at most ``wait_s`` if that is nothing."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._received), wait_s)
            taken = list(self._received)
            self._received.clear()
        return taken

    def send(self, message: ToService) -> None:
        """To the service that said `Hello` last; lost if there is none."""
        with suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)

    def close(self) -> None:
        """What was sent before still leaves."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, None)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._outgoing = asyncio.get_running_loop(), asyncio.Queue[ToService | None]()
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        authenticator = WatchedAuthenticator(context)
        authenticator.start()
        secret = read_secret(self._run_folder)
        authenticator.configure_curve_callback(domain="*", credentials_provider=OnlyKeyOf(secret, SERVICE_KEY))
        socket = context.socket(zmq.ROUTER)
        serve_curve(socket, secret, TRAINER_KEY, MAX_BYTES)
        socket.sndhwm = socket.rcvhwm = 0  # a router drops what is above it
        socket.linger = 500  # ms
        socket.ipv6 = ":" in self._host
        port = socket.bind_to_random_port(f"tcp://{bracketed(self._host)}")
        publish_endpoint(self._run_folder, ROLE, 0, {"operations": port}, host=self._host)
        self._started.set()
        reading = watched_task("operations-socket", partial(self._read, socket))
        try:
            while (message := await self._outgoing.get()) is not None:
                if self._service:
                    await socket.send_multipart([self._service, encode(message)])
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            socket.close()
            authenticator.stop()
            context.term()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._took(*await socket.recv_multipart())

    def _took(self, sender: bytes, payload: bytes) -> None:
        try:
            message = decode_to_trainer(payload)
        except msgspec.DecodeError as error:
            log.error("a message of the service is not understood: %s", error)
            return
        if isinstance(message, Hello):
            self._service = sender
        if sender != self._service:
            return  # of a connection that has ended
        with self._changed:
            self._received.append(message)
            self._changed.notify()


class ServiceEnd:
    """The service's end, in its event loop: ``received`` is called for every message, in order.

    Nothing that was sent before an `Expects` of its adapter needs to have arrived.
    """

    def __init__(self, run_folder: RunFolder, received: Callable[[ToService], None]) -> None:
        self._run_folder, self._received = run_folder, received
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def connected(self) -> bool:
        """Whether rank 0 can be reached as far as is known."""
        return self._socket is not None

    async def run(self) -> None:
        """Connect, say `Hello`, receive; for ever, until cancelled."""
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        try:
            while True:
                endpoint = self._find()
                if endpoint is not None:
                    await self._session(context, endpoint)
                await asyncio.sleep(LOOK_S)
        finally:
            context.destroy(linger=0)

    async def send(self, message: ToTrainer) -> None:
        """Send to rank 0; lost if it is away."""
        if self._socket is not None:
            await self._socket.send(encode(message))

    async def _session(self, context: zmq.asyncio.Context, endpoint: Endpoint) -> None:
        """One connection, until the other side has closed it or has another endpoint."""
        socket = context.socket(zmq.DEALER)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        socket.ipv6 = ":" in endpoint.host
        connect_curve(socket, read_secret(self._run_folder), SERVICE_KEY, TRAINER_KEY, MAX_BYTES)
        monitor = socket.get_monitor_socket(HANDSHAKE_REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(f"tcp://{bracketed(endpoint.host)}:{endpoint.ports['operations']}")
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            while True:
                readable = dict(await poller.poll(int(LOOK_S * 1000)))
                if socket in readable:
                    self._received(decode_to_service(await socket.recv()))
                elif monitor in readable:
                    event = parse_monitor_message(await monitor.recv_multipart())["event"]
                    if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        return
                    await socket.send(encode(Hello()))
                    self._socket = socket
                elif not readable and self._find() not in (None, endpoint):
                    return
        finally:
            self._socket = None
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _find(self) -> Endpoint | None:
        with suppress(OSError):  # it is read again
            return read_endpoint(self._run_folder, ROLE, 0)
        return None

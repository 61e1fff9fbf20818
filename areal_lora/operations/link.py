"""Both ends of the connection: rank 0 listens, the service connects, and connects again.

Rank 0 publishes its port as ``operations-0`` in the run folder. What is sent while the other end is away is lost; the
service sends `ServiceHello` after every connect, and receives what is expected (`link`, `protocol`).
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec
import zmq.asyncio

from areal_lora.network.rpc import FRAME_BYTES, LOOK_S, ConnectionLost, RpcServer, Subscription, Wire, parted
from areal_lora.operations import protocol
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import Endpoint, publish_endpoint, read_endpoint, read_secret

ROLE = "operations"
WIRE = Wire(
    server="operations trainer", client="operations service", max_request_bytes=FRAME_BYTES, max_reply_bytes=FRAME_BYTES
)

log = get_logger(__name__)


class TrainerEnd:
    """Rank 0's end, in a thread. Every method may be called from any thread."""

    def __init__(self, run_folder: RunFolder, host: str = "127.0.0.1") -> None:
        self._received: deque[protocol.ToTrainer] = deque()
        self._changed = threading.Condition()
        self._service = b""
        self._server = RpcServer(host, read_secret(run_folder), WIRE, self._took, linger_s=0.5)
        self._thread = watched_thread("operations", self._server.run)
        publish_endpoint(run_folder, ROLE, 0, {"operations": self._server.port}, host=host)

    def take(self, wait_s: float = 0.0) -> list[protocol.ToTrainer]:
        """Messages since the last call, after at most ``wait_s`` if there are none."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._received), wait_s)
            taken = list(self._received)
            self._received.clear()
        return taken

    def send(self, messages: Iterable[protocol.ToService]) -> None:
        """To the service that sent `ServiceHello` last; lost if there is none."""
        for message in messages if self._service else ():
            self._server.send(self._service, *parted(protocol.encode(message)))

    def close(self) -> None:
        """Messages that were sent before still leave."""
        self._server.close()
        self._thread.join(10)

    def _took(self, sender: bytes, *parts: bytes) -> None:
        try:
            message = protocol.decode_to_trainer(b"".join(parts))
        except msgspec.DecodeError as error:
            log.error("a message of the service is not understood: %s", error)
            return
        if isinstance(message, protocol.ServiceHello):
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

    def __init__(self, run_folder: RunFolder, received: Callable[[protocol.ToService], None]) -> None:
        self._run_folder, self._received = run_folder, received
        self._connection: Subscription | None = None

    async def run(self) -> None:
        """Connect, send `ServiceHello`, receive; for ever, until cancelled."""
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        try:
            while True:
                if (endpoint := self._find()) is not None:
                    await self._session(context, endpoint)
                await asyncio.sleep(LOOK_S)
        finally:
            context.destroy(linger=0)

    async def send(self, message: protocol.ToTrainer) -> None:
        """Send to rank 0; lost if it is away."""
        if self._connection is not None and self._connection.ready:
            await self._connection.send(protocol.encode(message))

    async def _session(self, context: zmq.asyncio.Context, endpoint: Endpoint) -> None:
        """One connection, until the other side has closed it or has another endpoint."""
        secret, port = read_secret(self._run_folder), endpoint.ports["operations"]
        self._connection = connection = Subscription(context, endpoint.host, port, secret, WIRE)
        try:
            with suppress(ConnectionLost):  # another connection greets again
                await connection.run(
                    lambda: protocol.encode(protocol.ServiceHello()),
                    lambda payload: self._received(protocol.decode_to_service(payload)),
                    lambda: self._find() not in (None, endpoint),
                )
        finally:
            self._connection = None
            connection.close()

    def _find(self) -> Endpoint | None:
        with suppress(OSError):  # it is read again
            return read_endpoint(self._run_folder, ROLE, 0)
        return None

"""Send commands to the background thread of each vLLM worker; no command waits for a model step.

Two zmq sockets (CURVE with keys from the run secret, loopback) between the server and all its workers::

    server (asyncio)                       worker
    call(Receive) ROUTER ------- DEALER -> background thread --> handle
        replies <- PULL --------- PUSH <-- from any thread, when the command is done

A reply names its call, so a late reply is not taken for the reply of another call.
"""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import zmq
import zmq.asyncio

from areal_lora.errors import PublishError
from areal_lora.network.rpc import Listener, Wire, connect_curve
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task, watched_thread
from areal_lora.weight_sync.messages import MAX_BODY_BYTES, JoinRequest, StageResult

log = get_logger(__name__)

CONNECT_S = 30.0
WIRE = Wire(
    server="server-channel",
    client="server-worker",
    max_request_bytes=1 << 20,  # what workers send
    max_reply_bytes=MAX_BODY_BYTES + 4096,  # commands to them, which may contain an announcement
)


class JoinCommand(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    request: JoinRequest


class Receive(msgspec.Struct, frozen=True, kw_only=True, tag="receive"):
    """Start staging ``announcement`` (from ``manifest.encode``) into ``slot``, negative where none is free.

    ``active`` lists the versions that requests can name: the worker forgets a staged version that is not in it.
    ``deadline`` is ``time.monotonic()`` of this machine, so that waiting for a worker counts.
    """

    announcement: bytes
    ref: str
    slot: int
    deadline: float
    active: tuple[str, ...]


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """Adapter ``name`` was dropped. Sent while nothing is staged."""

    name: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    pass


Command = JoinCommand | Receive | Forget | Ping


class WorkerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``staged`` answers a `Receive`; of the others, ``error`` is empty on success."""

    error: str = ""
    staged: StageResult | None = None


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    command: Command


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    worker: int
    answer: WorkerAnswer


# Made once: threads that decode a type for the first time, all at once, end the process.
_decode_call = msgspec.msgpack.Decoder(_Call).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class WorkerChannel:
    """The server's end of the channel. Call it from the server's event loop only."""

    def __init__(self, secret: str) -> None:
        self._listener = Listener("127.0.0.1", secret, WIRE)
        self._commands = self._listener.socket
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown worker is an error, not silence
        self._replies, replies_port = self._listener.bound(zmq.PULL)
        self._refused = self._listener.watch_refusals()
        self.ports = (self._listener.port, replies_port)
        self._identities: dict[int, bytes] = {}
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[_Reply]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def connect(self, n_workers: int) -> None:
        """Wait until every worker's thread has connected. Raises PublishError."""
        try:
            async with asyncio.timeout(CONNECT_S):
                while len(self._identities) < n_workers:
                    identity, worker = await self._commands.recv_multipart()
                    self._identities[int(worker)] = identity
        except TimeoutError:
            missing = sorted(set(range(n_workers)) - self._identities.keys())
            problem = f"workers {missing} did not connect within {CONNECT_S:.0f} s"
            if await self._refused.poll(0):
                raise PublishError(
                    f"{problem}: a process with another run secret was turned away "
                    "(fix: start server and workers with the same run folder)"
                ) from None
            raise PublishError(f"{problem}; see the log") from None
        self._reader = watched_task("worker-replies", self._read)

    async def call(self, command: Command, timeout_s: float) -> list[WorkerAnswer]:
        """Send ``command`` and return all answers in worker order. Raises PublishError if one is late."""
        number = next(self._numbers)
        replies = self._calls[number] = asyncio.Queue()
        got: dict[int, WorkerAnswer] = {}
        try:
            async with asyncio.timeout(timeout_s):
                body = msgspec.msgpack.encode(_Call(number=number, command=command))
                for identity in self._identities.values():
                    await self._commands.send_multipart([identity, body])
                while len(got) < len(self._identities):
                    reply = await replies.get()
                    got[reply.worker] = reply.answer
        except (TimeoutError, zmq.ZMQError) as e:
            missing = sorted(self._identities.keys() - got.keys())
            why = e.strerror if isinstance(e, zmq.ZMQError) else f"silent for {timeout_s:.0f} s"
            raise PublishError(f"workers {missing}: {why}; if this persists, restart the server") from None
        finally:
            del self._calls[number]
        return [got[w] for w in sorted(got)]

    async def _read(self) -> None:
        while True:
            reply = _decode_reply(await self._replies.recv())
            replies = self._calls.get(reply.number)
            if replies is None:
                log.warning("late answer of worker %d dropped: %s", reply.worker, reply.answer)
            else:
                replies.put_nowait(reply)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._listener.close()


Respond = Callable[[WorkerAnswer], None]


class CommandThread:
    """A worker's end of the channel: call ``handle(command, respond)`` in a thread, one command at a time.

    ``respond`` may be called later and from another thread. ``cores`` are for this thread and its child threads:
    vLLM binds the thread that creates this one to the cores of the model.
    """

    def __init__(
        self,
        *,
        secret: str,
        ports: Sequence[int],
        worker: int,
        cores: Sequence[int],
        handle: Callable[[Command, Respond], None],
    ) -> None:
        self._worker, self._cores, self._handle = worker, cores, handle
        self._sending = threading.Lock()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands, self._replies = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
        for socket, port in zip((self._commands, self._replies), ports, strict=True):
            socket.linger = 0
            connect_curve(socket, secret, WIRE.client, WIRE.server, WIRE.max_reply_bytes)
            socket.connect(f"tcp://127.0.0.1:{port}")
        watched_thread("worker-commands", self._run)

    def _run(self) -> None:
        os.sched_setaffinity(threading.get_native_id(), self._cores)
        self._commands.send(str(self._worker).encode())
        while True:
            call = _decode_call(self._commands.recv())
            self._handle(call.command, partial(self._respond, call.number))

    def _respond(self, number: int, answer: WorkerAnswer) -> None:
        with self._sending:
            self._replies.send(msgspec.msgpack.encode(_Reply(number=number, worker=self._worker, answer=answer)))

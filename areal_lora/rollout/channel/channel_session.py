"""The trainer's session with the controller: one connection per calling thread, one greeting for all of them.

A request waits for a controller that is away. A restarted controller answers ``StaleSession``; then the session is
opened again with the reminders (greeting, newest announcements, pending evaluations) and the request is repeated.
All requests are idempotent.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import zmq

from areal_lora.errors import ArealLoraError, RolloutError
from areal_lora.network.rpc import LOOK_S, Connection, ConnectionLost, Listener, Wire
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.channel.channel_messages import ErrorReply, Reply, Request, decode_request, encode
from areal_lora.rollout.ledger.file import LedgerError
from areal_lora.run_folder.rendezvous import Endpoint

WIRE = Wire(
    server="controller",
    client="trainer",
    max_request_bytes=64 << 20,  # the longest is a greeting with the ledger's snapshots
    max_reply_bytes=8 << 30,  # a batch: 4,096 sequences of 32,768 tokens take about 3 GiB
)

log = get_logger(__name__)
Handler = Callable[[Request], Awaitable[Reply]]


class ControlSocket:
    """Answers each request in its own task, so that a long poll delays no other request."""

    def __init__(self, host: str, secret: str) -> None:
        self._listener = Listener(host, secret, WIRE)
        self.port = self._listener.port

    async def serve(self, handler: Handler, tasks: asyncio.TaskGroup) -> None:
        """Receive until cancelled. ArealLoraError becomes an ErrorReply; LedgerError and others end the task group."""
        while True:
            frames = await self._listener.socket.recv_multipart()
            if len(frames) == 3:
                tasks.create_task(self._answer(handler, *frames))

    async def _answer(self, handler: Handler, client: bytes, request_id: bytes, payload: bytes) -> None:
        reply: Reply
        try:
            reply = await handler(decode_request(payload))
        except msgspec.DecodeError as error:
            reply = ErrorReply(reason=f"request is not understood: {error}")
        except LedgerError:
            raise  # no request may be answered from an inconsistent ledger
        except ArealLoraError as error:
            log.error("request refused: %s", error)
            reply = ErrorReply(reason=str(error))
        await self._listener.socket.send_multipart([client, request_id, encode(reply)])

    def close(self) -> None:
        self._listener.close(linger_s=0.5)


POLL_S = 10.0  # length of one long poll, and the interval of the waiting lines
ANSWER_S = 30.0  # what a live controller may need beyond a long poll
MAX_REFUSALS = 3  # handshakes in a row; one may be a controller that died in the middle of it


class Reminders:
    """Shared by the threads of one trainer."""

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._snapshots: dict[str, bytes] = {}
        self._joined: dict[str, m.JoinAdapter] = {}
        self._announced: dict[str, m.AnnounceVersion] = {}
        self._ended = set[str]()
        self._pending: dict[tuple[str, int, str], m.Evaluate] = {}

    def loaded(self, versions: Mapping[str, int], snapshots: Mapping[str, bytes]) -> None:
        with self._lock:
            self._versions, self._snapshots = dict(versions), dict(snapshots)

    def joined(self, request: m.JoinAdapter) -> None:
        with self._lock:
            self._joined[request.adapter] = request

    def paused(self, adapter: str, paused: bool) -> m.JoinAdapter:
        """``adapter`` has joined; returns the request that states whether it is paused."""
        with self._lock:
            request = self._joined[adapter] = msgspec.structs.replace(self._joined[adapter], paused=paused)
            return request

    def received(self, batch: m.Batch, version: int) -> None:
        """``batch`` is consumed at ``version``."""
        with self._lock:
            if (joined := self._joined.get(batch.adapter)) is not None:
                self._joined[batch.adapter] = msgspec.structs.replace(
                    joined, version=version + 1, snapshot=batch.snapshot
                )
            else:
                self._versions[batch.adapter], self._snapshots[batch.adapter] = version + 1, batch.snapshot

    def announced(self, request: m.AnnounceVersion) -> None:
        with self._lock:
            # For a new controller no server is lost or has left: it knows of none.
            self._announced[request.adapter] = msgspec.structs.replace(request, lost=(), left=())

    def ended(self, adapter: str) -> None:
        """A new controller receives the end of ``adapter``, not its newest version; of one that joined, nothing."""
        with self._lock:
            if self._joined.pop(adapter, None) is None:
                self._ended.add(adapter)
            self._announced.pop(adapter, None)
            self._pending = {key: request for key, request in self._pending.items() if key[0] != adapter}

    def requested(self, evaluation: m.Evaluate) -> None:
        with self._lock:
            self._pending[evaluation.adapter, evaluation.version, evaluation.tag] = evaluation

    def settle(self, result: m.EvalResult) -> bool:
        """Whether ``result`` was pending; it is not pending any more."""
        with self._lock:
            return self._pending.pop((result.adapter, result.version, result.tag), None) is not None

    @property
    def pending(self) -> list[m.Evaluate]:
        with self._lock:
            return list(self._pending.values())

    def greeting(self) -> tuple[m.Hello, list[m.SessionRequest]]:
        """The greeting of a new session, and the requests that follow it."""
        with self._lock:
            hello = m.Hello(trainer=self._trainer, versions=dict(self._versions), snapshots=dict(self._snapshots))
            ended = [m.EndAdapter(adapter=name) for name in sorted(self._ended)]
            return hello, [*ended, *self._joined.values(), *self._announced.values(), *self._pending.values()]


class _Local(threading.local):
    connection: Connection | None = None
    endpoint: Endpoint | None = None


class ControllerSession:
    """Requests and replies, from any thread. ``adapters`` are the controller's, known after the first greeting.

    ``replies_lost``: a reply that may have carried evaluation results did not arrive in this session.
    """

    def __init__(self, find_endpoint: Callable[[], Endpoint | None], secret: str, *, patience_s: float) -> None:
        self.adapters: tuple[str, ...] = ()
        self.reminders = Reminders(secrets.token_hex(8))
        self.replies_lost = False
        self._find_endpoint, self._secret, self._patience_s = find_endpoint, secret, patience_s
        self._context = zmq.Context()
        self._local = _Local()
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        self._greeting = threading.Lock()
        self._session = ""

    def request(self, request: m.SessionRequest, *expected: type[Any], wait_s: float = 0.0) -> Any:
        """The reply, of one of the ``expected`` types; ``wait_s`` the controller may wait before it answers."""
        if not self._session:
            raise RolloutError(f"{type(request).__name__} before hello()")
        while True:
            session = self._session
            reply = self._exchange(msgspec.structs.replace(request, session=session), wait_s)
            if not isinstance(reply, m.StaleSession):
                break
            self.greet(session)
        if not isinstance(reply, expected):
            raise RolloutError(f"the controller answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    def greet(self, stale: str = "") -> None:
        """Open a session, unless another thread has opened one since ``stale`` ended."""
        with self._greeting:
            while self._session == stale:
                hello, reminders = self.reminders.greeting()
                welcome = self._exchange(hello, 0.0)
                if not isinstance(welcome, m.Welcome):
                    raise RolloutError(f"the controller answered Hello with {type(welcome).__name__}")
                if stale:
                    log.warning("the rollout controller was restarted: greeted it again")
                replies = [
                    self._exchange(msgspec.structs.replace(request, session=welcome.session), 0.0)
                    for request in reminders
                ]
                if not any(isinstance(reply, m.StaleSession) for reply in replies):
                    self.adapters, self._session, self.replies_lost = welcome.adapters, welcome.session, False

    def close(self) -> None:
        """Close all connections. No other thread may be inside a method."""
        for connection in self._connections:
            connection.close()
        self._context.term()

    # ------------------------------------------------------------ one request

    def _exchange(self, request: m.Request, wait_s: float) -> m.Reply:
        """One request and its reply, over as many connections as it takes."""
        what, payload = type(request).__name__, m.encode(request)
        start = time.monotonic()
        remind_at, refusals, problem = start + POLL_S, 0, "it has not published its port"
        while True:
            endpoint = self._find_endpoint()
            if endpoint is not None:
                try:
                    connection = self._connection(endpoint)
                    reply = connection.exchange(payload, wait_s + ANSWER_S, partial(self._moved, endpoint))
                    break
                except ConnectionLost as lost:
                    self._drop_connection()
                    self.replies_lost |= isinstance(request, m.GetBatch)
                    problem = lost.reason
                    refusals = refusals + 1 if lost.refused else 0
            waited_s = time.monotonic() - start
            check_patience(what, problem, refusals, waited_s - wait_s, self._patience_s)
            if time.monotonic() >= remind_at:
                remind_at = time.monotonic() + POLL_S
                log.info("waiting for the rollout controller since %.0f s to send %s: %s", waited_s, what, problem)
            time.sleep(LOOK_S)
        decoded: m.Reply = m.decode_reply(reply)
        if isinstance(decoded, m.ErrorReply):
            raise RolloutError(f"the controller refused {what}: {decoded.reason}")
        return decoded

    def _moved(self, endpoint: Endpoint) -> bool:
        return self._find_endpoint() not in (None, endpoint)

    def _connection(self, endpoint: Endpoint) -> Connection:
        """This thread's connection to ``endpoint``."""
        if self._local.endpoint != endpoint:
            self._drop_connection()
        if (connection := self._local.connection) is None:
            port = endpoint.ports["control"]
            connection = Connection(self._context, endpoint.host, port, self._secret, WIRE)
            self._local.connection, self._local.endpoint = connection, endpoint
            with self._lock:
                self._connections.append(connection)
        return connection

    def _drop_connection(self) -> None:
        connection = self._local.connection
        if connection is not None:
            self._local.connection = None
            with self._lock:
                self._connections.remove(connection)
            connection.close()


def check_patience(what: str, problem: str, refusals: int, waited_s: float, patience_s: float) -> None:
    """Raise RolloutError for a controller with another run secret, or one that is away for ``patience_s``."""
    if refusals >= MAX_REFUSALS:
        raise RolloutError(
            f"the rollout controller at {problem}: it has another run secret "
            "(fix: start trainer and controller with the same run folder)"
        )
    if waited_s > patience_s:
        raise RolloutError(
            f"the rollout controller was not there for {what} for {waited_s:.0f} s: {problem} "
            "(fix: see logs/controller-0.log)"
        )

"""The trainer's side of the control socket: one blocking method per request.

The publisher announces versions from its own thread while the training loop waits for a batch: every thread has a
connection of its own, no call waits for another, and one greeting serves all of them. A request waits for a controller
that is away. A restarted controller answers ``StaleSession``; then the session is opened again with the reminders
(greeting, newest announcements, pending evaluations) and the request is repeated. All requests are idempotent.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq

from areal_lora.errors import RolloutError
from areal_lora.network.rpc import LOOK_S, Connection, ConnectionLost
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.run_folder.rendezvous import Endpoint
from areal_lora.types import AdapterRef

SHORT_POLL_S = 1.0  # of polls between which the caller may be interrupted
JOIN_S = 300.0  # for prompts and scorers of a joining adapter
POLL_S = 10.0  # length of one long poll, and the interval of the waiting lines
ANSWER_S = 30.0  # what a live controller may need beyond a long poll
MAX_REFUSALS = 3  # handshakes in a row; one may be a controller that died in the middle of it

log = get_logger(__name__)


class Reminders:
    """What a new controller has to know of one trainer; shared by the trainer's threads."""

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

    def note(self, request: m.SessionRequest) -> None:
        """Repeat ``request`` to a new controller, in place of what it replaces.

        Of an ended adapter that controller receives the end alone, of one that had joined nothing.
        """
        with self._lock:
            match request:
                case m.JoinAdapter():
                    self._joined[request.adapter] = request
                case m.AnnounceVersion():  # for a new controller no server is lost or has left: it knows of none
                    self._announced[request.adapter] = msgspec.structs.replace(request, lost=(), left=())
                case m.Evaluate():
                    self._pending[request.adapter, request.version, request.tag] = request
                case m.EndAdapter():
                    if self._joined.pop(request.adapter, None) is None:
                        self._ended.add(request.adapter)
                    self._announced.pop(request.adapter, None)
                    self._pending = {key: each for key, each in self._pending.items() if key[0] != request.adapter}

    def joined(self, adapter: str) -> m.JoinAdapter:
        with self._lock:
            return self._joined[adapter]

    def received(self, batch: m.Batch) -> None:
        after = batch.step + 1
        with self._lock:
            if (joined := self._joined.get(batch.adapter)) is not None:
                self._joined[batch.adapter] = msgspec.structs.replace(joined, version=after, snapshot=batch.snapshot)
            else:
                self._versions[batch.adapter], self._snapshots[batch.adapter] = after, batch.snapshot

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


class ControllerSession:
    """Requests and replies, from any thread.

    ``replies_lost``: a reply that may have carried evaluation results did not arrive in this session.
    """

    def __init__(self, find_endpoint: Callable[[], Endpoint | None], secret: str, *, patience_s: float) -> None:
        self.reminders = Reminders(secrets.token_hex(8))
        self.replies_lost = False
        self._find_endpoint, self._secret, self._patience_s = find_endpoint, secret, patience_s
        self._context = zmq.Context()
        self._connections: dict[int, tuple[Endpoint, Connection]] = {}  # by thread
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
                    self._session, self.replies_lost = welcome.session, False

    def close(self) -> None:
        for _, connection in self._connections.values():
            connection.close()
        self._context.term()

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
        held, connection = self._connections.get(threading.get_ident(), (None, None))
        if connection is None or held != endpoint:
            self._drop_connection()
            connection = Connection(self._context, endpoint.host, endpoint.ports["control"], self._secret, m.WIRE)
            self._connections[threading.get_ident()] = endpoint, connection
        return connection

    def _drop_connection(self) -> None:
        if (held := self._connections.pop(threading.get_ident(), None)) is not None:
            held[1].close()


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


class WaitingLines:
    """Logs every 10 s what the awaited batches lack."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._remind_at = self._start + POLL_S

    def report(self, lacking: Sequence[m.Lacking]) -> list[str]:
        """Log what is due; returns the likely reasons then, each with the name of its adapter."""
        now = time.monotonic()
        if not lacking or now < self._remind_at:
            return []
        self._remind_at += POLL_S
        log.info("waiting for rollouts since %.0f s: %s", now - self._start, "; ".join(map(str, lacking)))
        return [f"{one.adapter}: {one.note}" for one in lacking if one.note]


class ControllerClient:
    """Requests of a trainer to the controller that ``find_endpoint`` names (None: there is none now).

    All methods may be called from any thread, ``hello`` first. Every method raises RolloutError if the controller
    refuses the request, does not answer for ``patience_s``, or does not accept the run secret.
    """

    def __init__(self, find_endpoint: Callable[[], Endpoint | None], secret: str, *, patience_s: float = 300.0) -> None:
        self._session = ControllerSession(find_endpoint, secret, patience_s=patience_s)
        self._lock = threading.Lock()
        self._events: list[m.EvalResult] = []  # fetched, and not yet returned by a method

    def hello(self, versions: Mapping[str, int], snapshots: Mapping[str, bytes]) -> None:
        """State which version of each adapter has been loaded, with the ledger snapshots of its checkpoint.

        What the controller has of later versions is undone. Once per process.
        """
        self._session.reminders.loaded(versions, snapshots)
        self._session.greet()

    def announce(
        self, ref: AdapterRef, servers: Mapping[str, str], lost: Sequence[str] = (), left: Sequence[str] = ()
    ) -> None:
        """`AnnounceVersion`: new groups are sampled with ``ref``."""
        request = m.AnnounceVersion(
            adapter=ref.name, version=ref.version, servers=dict(servers), lost=tuple(lost), left=tuple(left)
        )
        self._tell(request)

    def commit(self, adapter: str, step: int) -> None:
        """A checkpoint that contains ``step`` and all steps before it is durable."""
        self._session.request(m.CommitStep(adapter=adapter, step=step), m.Ack)

    def poll(self, wanted: Sequence[AdapterRef], wait_s: float | None = None) -> m.Batch | m.AdapterFailed | m.NotReady:
        """A batch of the first of ``wanted`` that has one, or what they lack after ``wait_s``, by default a second.

        Evaluation results that came with the reply are kept for `take_events`.
        """
        wait_s = SHORT_POLL_S if wait_s is None else wait_s
        request = m.GetBatch(wanted=tuple(wanted), timeout_s=wait_s)
        reply: m.Batch | m.AdapterFailed | m.NotReady = self._session.request(
            request, m.Batch, m.AdapterFailed, m.NotReady, wait_s=wait_s
        )
        if isinstance(reply, m.AdapterFailed):
            return reply
        self._keep(reply.events)
        if isinstance(reply, m.Batch):
            self._session.reminders.received(reply)
        return reply

    def take_events(self) -> tuple[m.EvalResult, ...]:
        """Evaluation results not yet returned by any method."""
        with self._lock:
            found, self._events = tuple(self._events), []
        return found

    def join(self, adapter: str, config: bytes, version: int, snapshot: bytes) -> str:
        """`JoinAdapter`; returns why it cannot be rolled out, or nothing."""
        request = m.JoinAdapter(adapter=adapter, config=config, version=version, snapshot=snapshot)
        reply = self._session.request(request, m.Ack, m.AdapterFailed, wait_s=JOIN_S)
        if isinstance(reply, m.AdapterFailed):
            return reply.reason
        self._session.reminders.note(request)
        return ""

    def pause(self, adapter: str, paused: bool) -> None:
        """Issue no groups of ``adapter``, which has joined; or again some."""
        self._tell(msgspec.structs.replace(self._session.reminders.joined(adapter), paused=paused))

    def end(self, adapter: str) -> None:
        """Nothing more is needed of ``adapter``: no groups are issued for it any more."""
        self._tell(m.EndAdapter(adapter=adapter))

    def request_eval(self, ref: AdapterRef, tag: str) -> None:
        """Start a greedy evaluation as soon as ``ref`` is announced; rollouts continue meanwhile."""
        self._tell(m.Evaluate(adapter=ref.name, version=ref.version, tag=tag))

    def shutdown(self) -> None:
        self._session.request(m.Shutdown(), m.Ack)

    def close(self) -> None:
        """Close all connections. No other thread may be inside a method."""
        self._session.close()

    def _tell(self, request: m.SessionRequest) -> None:
        """Noted first: a controller that starts meanwhile has to know."""
        self._session.reminders.note(request)
        self._session.request(request, m.Ack)

    def _keep(self, events: tuple[m.EvalResult, ...]) -> None:
        """Keep pending results, each once: a restarted controller may have received the same request again."""
        session = self._session
        with self._lock:
            self._events.extend(event for event in events if session.reminders.settle(event))
            lost, session.replies_lost = session.replies_lost, False
        for evaluation in session.reminders.pending if lost else ():
            session.request(evaluation, m.Ack)

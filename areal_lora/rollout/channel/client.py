"""The trainer's side of the control socket: blocking calls, one connection per calling thread.

The publisher announces versions from its own thread while the training loop waits for a
batch, so no two threads share a socket and no call waits for another.

A controller that is away is waited for. One that was restarted knows nothing of this trainer: it
answers ``NotGreeted``, is told again what it has to know (the greeting, the newest announcements,
the evaluations it still owes), and the request is repeated. All requests are idempotent.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from areal_lora.errors import RolloutError
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel import messages as m
from areal_lora.rollout.channel.connection import LOOK_S, Connection, ConnectionLost
from areal_lora.run_folder.rendezvous import Endpoint
from areal_lora.types import AdapterRef

POLL_S = 10.0  # length of one long poll, and the rhythm of the waiting lines
SHORT_POLL_S = 1.0  # of batches, where something else may have to be done meanwhile
ANSWER_S = 30.0  # what a live controller may need beyond a long poll
MAX_REFUSALS = 3  # handshakes in a row; one may be a controller that died in the middle of it

log = get_logger(__name__)


class _Local(threading.local):
    connection: Connection | None = None


class RolloutClient:
    """Talks to the controller that ``find_endpoint`` names (None: there is none now).

    All methods may be called from any thread, ``hello`` first. Every method raises RolloutError if
    the controller refuses the request, stays away for ``patience_s``, or does not accept the
    run secret.
    """

    def __init__(self, find_endpoint: Callable[[], Endpoint | None], secret: str, *, patience_s: float = 300.0) -> None:
        self.adapters: tuple[str, ...] = ()
        self._find_endpoint, self._secret, self._patience_s = find_endpoint, secret, patience_s
        self._context = zmq.Context()
        self._local = _Local()
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        self._greeting = threading.Lock()
        self._trainer = secrets.token_hex(8)
        self._life = ""
        self._events: list[m.EvalResult] = []
        self._events_lost = False  # a reply that may have carried some did not arrive
        # What a restarted controller has to be told.
        self._versions: dict[str, int] = {}
        self._snapshots: dict[str, bytes] = {}
        self._announced: dict[str, m.AnnounceVersion] = {}
        self._owed: dict[tuple[str, int, str], m.Evaluate] = {}

    def hello(self, versions: Mapping[str, int], snapshots: Mapping[str, bytes]) -> None:
        """Say which version of each adapter has been loaded, with the ledger snapshots of its checkpoint.

        What the controller has of later versions is undone. Once per process.
        """
        self._versions, self._snapshots = dict(versions), dict(snapshots)
        self._greet("")

    def announce(self, ref: AdapterRef, servers: Mapping[str, str], lost: Sequence[str] = ()) -> None:
        """``ref`` is active on ``servers`` (data-plane URL by name) and nowhere else: new groups are sampled with it.

        ``lost`` were given up since the last announcement.
        """
        request = m.AnnounceVersion(adapter=ref.name, version=ref.version, servers=dict(servers), lost=tuple(lost))
        with self._lock:
            # To a new controller nothing is lost: it knows of no server.
            self._announced[ref.name] = msgspec.structs.replace(request, lost=())
        self._ask(request, m.Done)

    def commit(self, adapter: str, step: int) -> None:
        """A checkpoint that contains ``step`` and all steps before it is durable."""
        self._ask(m.CommitStep(adapter=adapter, step=step), m.Done)

    def next_batch(self, adapter: str, *, step: int, version: int) -> m.Batch:
        """Block until the groups of ``step`` are ready, saying every 10 s what is missing."""
        batch = None
        while batch is None:
            batch = self.poll_batch(adapter, step=step, version=version, interrupted=lambda: False)
        return batch

    def poll_batch(self, adapter: str, *, step: int, version: int, interrupted: Callable[[], bool]) -> m.Batch | None:
        """Like ``next_batch``, but None as soon as ``interrupted()``, which is asked about every second.

        ``events`` of the batch are the evaluation results not yet given out by any method.
        """
        start = time.monotonic()
        remind_at = start + POLL_S
        request = m.GetBatch(adapter=adapter, step=step, version=version, timeout_s=SHORT_POLL_S)
        while True:
            reply: m.Batch | m.NotReady = self._ask(request, m.Batch, m.NotReady, wait_s=SHORT_POLL_S)
            if isinstance(reply, m.Batch):
                self._keep(reply.events)
                with self._lock:
                    self._versions[adapter], self._snapshots[adapter] = version + 1, reply.snapshot
                return msgspec.structs.replace(reply, events=self._give_out(lambda _: True))
            if interrupted():
                return None
            if time.monotonic() < remind_at:
                continue
            remind_at += POLL_S
            log.info(
                "waiting for rollout batch %d since %.0f s: %d/%d groups ready, %d running, %d dropped%s",
                step,
                time.monotonic() - start,
                reply.ready,
                reply.needed,
                reply.running,
                reply.dropped,
                f"; {reply.note}" if reply.note else "",
            )

    def request_eval(self, ref: AdapterRef, tag: str) -> None:
        """Start a greedy evaluation as soon as ``ref`` is announced; rollouts go on meanwhile."""
        request = m.Evaluate(adapter=ref.name, version=ref.version, tag=tag)
        with self._lock:
            self._owed[ref.name, ref.version, tag] = request
        self._ask(request, m.Done)

    def wait_eval(self, ref: AdapterRef, tag: str) -> m.EvalResult:
        """Block until that evaluation is over, saying every 10 s that it is waited for; look at ``error`` first."""
        result = None
        while result is None:
            result = self.poll_eval(ref, tag, interrupted=lambda: False)
        return result

    def poll_eval(self, ref: AdapterRef, tag: str, *, interrupted: Callable[[], bool]) -> m.EvalResult | None:
        """Like ``wait_eval``, but None as soon as ``interrupted()``, which is asked about every second.

        Results of other evaluations stay for later calls of this and for :meth:`next_batch`.
        """
        start = time.monotonic()
        remind_at = start + POLL_S
        request = m.GetEvents(adapter=ref.name, timeout_s=SHORT_POLL_S)
        while True:
            found = self._give_out(lambda e: (e.adapter, e.version, e.tag) == (ref.name, ref.version, tag))
            if found:
                return found[0]
            reply: m.Events = self._ask(request, m.Events, wait_s=SHORT_POLL_S)
            self._keep(reply.events)
            if reply.events:
                continue
            if interrupted():
                return None
            if time.monotonic() >= remind_at:
                remind_at += POLL_S
                log.info("waiting for the %s evaluation of %s since %.0f s", tag, ref, time.monotonic() - start)

    def stats(self, adapter: str) -> m.Stats:
        reply: m.Stats = self._ask(m.GetStats(adapter=adapter), m.Stats)
        return reply

    def shutdown(self) -> None:
        """End the controller."""
        self._ask(m.Shutdown(), m.Done)

    def close(self) -> None:
        """Close all connections. No other thread may be inside a method."""
        for connection in self._connections:
            connection.close()
        self._context.term()

    # ------------------------------------------------------------ evaluation results

    def _keep(self, events: tuple[m.EvalResult, ...]) -> None:
        """Only what was asked for and is not here yet: a restarted controller may have been asked again."""
        with self._lock:
            self._events.extend(e for e in events if self._owed.pop((e.adapter, e.version, e.tag), None))
            missing = list(self._owed.values()) if self._events_lost else []
            self._events_lost = False
        for evaluation in missing:
            self._ask(evaluation, m.Done)

    def _give_out(self, wanted: Callable[[m.EvalResult], bool]) -> tuple[m.EvalResult, ...]:
        with self._lock:
            found = tuple(event for event in self._events if wanted(event))
            self._events = [event for event in self._events if event not in found]
        return found

    # ------------------------------------------------------------ request and reply

    def _ask(self, request: m.ToThisLife, *expected: type[Any], wait_s: float = 0.0) -> Any:
        if not self._versions:
            raise RolloutError(f"{type(request).__name__} before hello()")
        while True:
            life = self._life
            reply = self._exchange(msgspec.structs.replace(request, life=life), wait_s)
            if not isinstance(reply, m.NotGreeted):
                break
            self._greet(life)
        if not isinstance(reply, expected):
            raise RolloutError(f"the controller answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    def _greet(self, old_life: str) -> None:
        """Start a conversation, unless another thread has done so since ``old_life`` ended."""
        with self._greeting:
            while self._life == old_life:
                with self._lock:
                    hello = m.Hello(
                        trainer=self._trainer, versions=dict(self._versions), snapshots=dict(self._snapshots)
                    )
                    reminders: list[m.ToThisLife] = [*self._announced.values(), *self._owed.values()]
                welcome = self._exchange(hello, 0.0)
                if not isinstance(welcome, m.Welcome):
                    raise RolloutError(f"the controller answered Hello with {type(welcome).__name__}")
                if old_life:
                    log.warning("the rollout controller was restarted: greeted it again")
                replies = [
                    self._exchange(msgspec.structs.replace(request, life=welcome.life), 0.0) for request in reminders
                ]
                if not any(isinstance(reply, m.NotGreeted) for reply in replies):
                    self.adapters, self._life, self._events_lost = welcome.adapters, welcome.life, False

    def _exchange(self, request: m.Request, wait_s: float) -> m.Reply:
        """One request and its reply, over as many connections as it takes; ``wait_s`` the controller may wait."""
        what, payload = type(request).__name__, m.encode(request)
        start = time.monotonic()
        remind_at, refusals, problem = start + POLL_S, 0, "it has not published its port"
        while True:
            endpoint = self._find_endpoint()
            if endpoint is not None:
                try:
                    connection = self._connection(endpoint)
                    reply = connection.exchange(payload, wait_s + ANSWER_S, self._find_endpoint)
                    break
                except ConnectionLost as lost:
                    self._drop_connection()
                    self._events_lost |= isinstance(request, m.GetBatch | m.GetEvents)
                    problem = lost.reason
                    refusals = refusals + 1 if lost.refused else 0
            self._check_patience(what, problem, refusals, time.monotonic() - start - wait_s)
            if time.monotonic() >= remind_at:
                remind_at = time.monotonic() + POLL_S
                log.info(
                    "waiting for the rollout controller since %.0f s to ask for %s: %s",
                    time.monotonic() - start,
                    what,
                    problem,
                )
            time.sleep(LOOK_S)
        decoded = m.decode_reply(reply)
        if isinstance(decoded, m.Failed):
            raise RolloutError(f"the controller refused {what}: {decoded.reason}")
        return decoded

    def _check_patience(self, what: str, problem: str, refusals: int, waited_s: float) -> None:
        if refusals >= MAX_REFUSALS:
            raise RolloutError(
                f"the rollout controller at {problem}: it has another run secret "
                "(fix: start trainer and controller with the same run folder)"
            )
        if waited_s > self._patience_s:
            raise RolloutError(
                f"the rollout controller was not there for {what} for {waited_s:.0f} s: {problem} "
                "(fix: see logs/controller-0.log)"
            )

    def _connection(self, endpoint: Endpoint) -> Connection:
        connection = self._local.connection
        if connection is not None and connection.endpoint != endpoint:
            self._drop_connection()
            connection = None
        if connection is None:
            connection = self._local.connection = Connection(self._context, endpoint, self._secret)
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

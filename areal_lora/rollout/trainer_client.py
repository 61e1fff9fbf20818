"""The trainer's side of the control socket: blocking calls, one socket per calling thread.

The publisher announces versions from its own thread while the training loop waits for a
batch, so no two threads share a socket and no call waits for another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from areal_lora.config.rendezvous import Endpoint, zmq_curve_keys
from areal_lora.errors import RolloutError
from areal_lora.obs.log import get_logger
from areal_lora.rollout import messages as m
from areal_lora.rollout.control import CLIENT_ROLE, SERVER_ROLE
from areal_lora.types import AdapterRef

POLL_S = 10.0  # length of one long poll, and the rhythm of the waiting lines
SHORT_POLL_S = 1.0  # of batches, where something else may have to be done meanwhile
ANSWER_S = 30.0  # what a live controller may need beyond a long poll

_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
log = get_logger(__name__)


@dataclass(slots=True)
class _Line:
    """One thread's connection. ``ready`` once the CURVE handshake has succeeded."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    next_id: int = 0
    ready: bool = False


class _Local(threading.local):
    line: _Line | None = None


class RolloutClient:
    """Talks to the controller at ``endpoint``; all methods may be called from any thread.

    Every method raises RolloutError if the controller refuses the request, does not answer, or
    does not accept the run secret.
    """

    def __init__(self, endpoint: Endpoint, secret: str) -> None:
        self._address = f"tcp://{endpoint.host}:{endpoint.ports['control']}"
        self._server_key, _ = zmq_curve_keys(secret, SERVER_ROLE)
        self._keys = zmq_curve_keys(secret, CLIENT_ROLE)
        self._context = zmq.Context()
        self._local = _Local()
        self._lines: list[_Line] = []
        self._events: list[m.EvalResult] = []
        self._lock = threading.Lock()
        try:
            self.adapters: tuple[str, ...] = self._ask(m.Hello(), m.Welcome).adapters
        except RolloutError:
            self.close()
            raise

    def announce(self, ref: AdapterRef, servers: Mapping[str, str], lost: Sequence[str] = ()) -> None:
        """``ref`` is active on ``servers`` (data-plane URL by name) and nowhere else: new groups are sampled with it.

        ``lost`` were given up since the last announcement.
        """
        request = m.AnnounceVersion(adapter=ref.name, version=ref.version, servers=dict(servers), lost=tuple(lost))
        self._ask(request, m.Done)

    def next_batch(self, adapter: str, *, step: int, version: int) -> m.Batch:
        """Block until the groups of ``step`` are ready, saying every 10 s what is missing."""
        batch = None
        while batch is None:
            batch = self.poll_batch(adapter, step=step, version=version, interrupted=lambda: False)
        return batch

    def poll_batch(
        self, adapter: str, *, step: int, version: int, interrupted: Callable[[], bool]
    ) -> m.Batch | None:
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
                return msgspec.structs.replace(reply, events=self._give_out(lambda _: True))
            if interrupted():
                return None
            if time.monotonic() < remind_at:
                continue
            remind_at += POLL_S
            log.info(
                "waiting for rollout batch %d since %.0f s: %d/%d groups ready, %d running, %d dropped%s",
                step, time.monotonic() - start, reply.ready, reply.needed, reply.running, reply.dropped,
                f"; last fault: {reply.note}" if reply.note else "",
            )

    def request_eval(self, ref: AdapterRef, tag: str) -> None:
        """Start a greedy evaluation as soon as ``ref`` is announced; rollouts go on meanwhile."""
        self._ask(m.Evaluate(adapter=ref.name, version=ref.version, tag=tag), m.Done)

    def wait_eval(self, ref: AdapterRef, tag: str) -> m.EvalResult:
        """Block until that evaluation is over; look at ``error`` before ``accuracy``.

        Results of other evaluations stay for :meth:`poll_evals` and :meth:`next_batch`.
        """
        start = time.monotonic()
        while True:
            found = self._give_out(lambda e: (e.adapter, e.version, e.tag) == (ref.name, ref.version, tag))
            if found:
                return found[0]
            reply: m.Events = self._ask(m.GetEvents(adapter=ref.name, timeout_s=POLL_S), m.Events, wait_s=POLL_S)
            self._keep(reply.events)
            if not reply.events:
                log.info("waiting for the %s evaluation of %s since %.0f s", tag, ref, time.monotonic() - start)

    def poll_evals(self, adapter: str) -> tuple[m.EvalResult, ...]:
        """Evaluation results of ``adapter`` not yet given out; does not wait."""
        self._keep(self._ask(m.GetEvents(adapter=adapter), m.Events).events)
        return self._give_out(lambda event: event.adapter == adapter)

    def stats(self, adapter: str) -> m.Stats:
        reply: m.Stats = self._ask(m.GetStats(adapter=adapter), m.Stats)
        return reply

    def shutdown(self) -> None:
        """End the controller."""
        self._ask(m.Shutdown(), m.Done)

    def close(self) -> None:
        """Close all connections. No other thread may be inside a method."""
        for line in self._lines:
            line.socket.disable_monitor()
            line.monitor.close(linger=0)
            line.socket.close(linger=0)
        self._context.term()

    # ------------------------------------------------------------ evaluation results

    def _keep(self, events: tuple[m.EvalResult, ...]) -> None:
        with self._lock:
            self._events.extend(events)

    def _give_out(self, wanted: Callable[[m.EvalResult], bool]) -> tuple[m.EvalResult, ...]:
        with self._lock:
            found = tuple(event for event in self._events if wanted(event))
            self._events = [event for event in self._events if event not in found]
        return found

    # ------------------------------------------------------------ request and reply

    def _ask(self, request: m.Request, *expected: type[Any], wait_s: float = 0.0) -> Any:
        line = self._line()
        line.next_id += 1
        request_id = line.next_id.to_bytes(8, "little")
        line.socket.send_multipart([request_id, m.encode(request)])
        reply = m.decode_reply(self._receive(line, request_id, type(request).__name__, wait_s + ANSWER_S))
        if isinstance(reply, m.Failed):
            raise RolloutError(f"the controller refused {type(request).__name__}: {reply.reason}")
        if not isinstance(reply, expected):
            raise RolloutError(f"the controller answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    def _receive(self, line: _Line, request_id: bytes, what: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        poller = zmq.Poller()
        poller.register(line.socket, zmq.POLLIN)
        poller.register(line.monitor, zmq.POLLIN)
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            readable = dict(poller.poll(int(remaining_s * 1000) + 1))
            if line.monitor in readable:
                self._watch_handshake(line)
            if line.socket in readable:
                answered_id, payload = line.socket.recv_multipart()
                if answered_id == request_id:  # else: late answer to a request that was given up
                    return payload
        raise RolloutError(
            f"the rollout controller at {self._address} did not answer {what} within {timeout_s:.0f} s "
            "(fix: see logs/controller-0.log)"
        )

    def _watch_handshake(self, line: _Line) -> None:
        """A wrong key never becomes an answer, so the handshake's end is what tells."""
        event = recv_monitor_message(line.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            line.ready = True
        elif event & _REFUSED or (event == zmq.EVENT_DISCONNECTED and not line.ready):
            raise RolloutError(
                f"the rollout controller at {self._address} refused the handshake: it has another run secret "
                "(fix: start trainer and controller with the same run folder)"
            )

    def _line(self) -> _Line:
        line = self._local.line
        if line is None:
            socket = self._context.socket(zmq.DEALER)
            socket.curve_serverkey = self._server_key
            socket.curve_publickey, socket.curve_secretkey = self._keys
            monitor = socket.get_monitor_socket(
                _REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            socket.connect(self._address)
            line = self._local.line = _Line(socket, monitor)
            with self._lock:
                self._lines.append(line)
        return line

"""The trainer's side of the control socket: one blocking method per request.

The publisher announces versions from its own thread while the training loop waits for a batch: no two threads share
a connection, and no call waits for another (`session`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.channel.channel_session import POLL_S, ControllerSession
from areal_lora.run_folder.rendezvous import Endpoint
from areal_lora.types import AdapterRef

SHORT_POLL_S = 1.0  # of polls between which the caller may be interrupted
JOIN_S = 300.0  # for prompts and scorers of a joining adapter

log = get_logger(__name__)


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

    All methods may be called from any thread, ``hello`` first. Every method raises RolloutError if
    the controller refuses the request, does not answer for ``patience_s``, or does not accept the
    run secret.
    """

    def __init__(self, find_endpoint: Callable[[], Endpoint | None], secret: str, *, patience_s: float = 300.0) -> None:
        self._session = ControllerSession(find_endpoint, secret, patience_s=patience_s)
        self._lock = threading.Lock()
        self._events: list[m.EvalResult] = []  # fetched, and not yet returned by a method

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._session.adapters

    def hello(self, versions: Mapping[str, int], snapshots: Mapping[str, bytes]) -> None:
        """State which version of each adapter has been loaded, with the ledger snapshots of its checkpoint.

        What the controller has of later versions is undone. Once per process.
        """
        self._session.reminders.loaded(versions, snapshots)
        self._session.greet()

    def announce(
        self, ref: AdapterRef, servers: Mapping[str, str], lost: Sequence[str] = (), left: Sequence[str] = ()
    ) -> None:
        """``ref`` is active on ``servers`` (data-plane URL by name) and nowhere else: new groups are sampled with it.

        Since the previous announcement ``lost`` were excluded, and ``left`` have left in order.
        """
        request = m.AnnounceVersion(
            adapter=ref.name, version=ref.version, servers=dict(servers), lost=tuple(lost), left=tuple(left)
        )
        self._session.reminders.announced(request)
        self._session.request(request, m.Ack)

    def commit(self, adapter: str, step: int) -> None:
        """A checkpoint that contains ``step`` and all steps before it is durable."""
        self._session.request(m.CommitStep(adapter=adapter, step=step), m.Ack)

    def poll(
        self, wanted: Sequence[m.StepRequest], wait_s: float | None = None
    ) -> m.Batch | m.AdapterFailed | m.NotReady:
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
            version = next(w.version for w in wanted if w.adapter == reply.adapter)
            self._session.reminders.received(reply, version)
        return reply

    def take_events(self) -> tuple[m.EvalResult, ...]:
        """Evaluation results not yet returned by any method."""
        with self._lock:
            found, self._events = tuple(self._events), []
        return found

    def join(self, adapter: str, config: bytes, version: int, snapshot: bytes) -> str:
        """Start an adapter that the configuration does not list, at ``version``; ``config`` is its entry as JSON.

        Returns why it cannot be rolled out, or nothing.
        """
        request = m.JoinAdapter(adapter=adapter, config=config, version=version, snapshot=snapshot)
        reply = self._session.request(request, m.Ack, m.AdapterFailed, wait_s=JOIN_S)
        if isinstance(reply, m.AdapterFailed):
            return reply.reason
        self._session.reminders.joined(request)
        return ""

    def pause(self, adapter: str, paused: bool) -> None:
        """Issue no groups of ``adapter``, which has joined; or again some."""
        self._session.request(self._session.reminders.paused(adapter, paused), m.Ack)

    def end(self, adapter: str) -> None:
        """Nothing more is needed of ``adapter``: no groups are issued for it any more."""
        self._session.reminders.ended(adapter)
        self._session.request(m.EndAdapter(adapter=adapter), m.Ack)

    def request_eval(self, ref: AdapterRef, tag: str) -> None:
        """Start a greedy evaluation as soon as ``ref`` is announced; rollouts continue meanwhile."""
        request = m.Evaluate(adapter=ref.name, version=ref.version, tag=tag)
        self._session.reminders.requested(request)
        self._session.request(request, m.Ack)

    def shutdown(self) -> None:
        """End the controller."""
        self._session.request(m.Shutdown(), m.Ack)

    def close(self) -> None:
        """Close all connections. No other thread may be inside a method."""
        self._session.close()

    # ------------------------------------------------------------ evaluation results

    def _keep(self, events: tuple[m.EvalResult, ...]) -> None:
        """Keep pending results, each once: a restarted controller may have received the same request again."""
        session = self._session
        with self._lock:
            self._events.extend(event for event in events if session.reminders.settle(event))
            lost, session.replies_lost = session.replies_lost, False
        for evaluation in session.reminders.pending if lost else ():
            session.request(evaluation, m.Ack)

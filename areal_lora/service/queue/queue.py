"""The queue of SDK clients' requests: taken durably, carried out in order, answered once.

    submit -> file -> outbox -> trainer rank 0 -> outbox -> file -> outcome
    create_model, serve -> rows of the desired state -> the trainer has the adapter

Every call raises `RequestError`; what is another tenant's is answered like what does not exist. What a call returns is
durable. All changes are made by the service's one writer thread.
"""

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from areal_lora.errors import RequestError, Unavailable
from areal_lora.operations.link import ServiceEnd
from areal_lora.operations.protocol import Acknowledgement, Durable, Expects, OperationCompletion, ToService
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached, watched_task
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.queue import client_sessions, queue_writer, sequencer
from areal_lora.service.queue.placement import SILENT_S, Change, Heartbeats, Placement, RunObserver, fits
from areal_lora.service.queue.queue_rows import Quota, SavedState, model_id
from areal_lora.service.queue.queue_store import SESSIONS, Transaction
from areal_lora.service.queue.requests import Answer, CreateModel, Lora, ModelAction, Pending
from areal_lora.types import AdapterPhase

log = get_logger(__name__)

EVERY_S = 1.0
FORGET_S = 10.0  # it reads a row of every answer that is kept; a tenant's may be longer than its quota for so long
LAPSE_S = 10.0
"""A longer time between two rounds of `keep`: the machine slept, or the process was stopped."""
SHARED_S = 0.25
FAILED_S = 10.0  # an adapter that has failed may still have outcomes on their way
T = TypeVar("T")
Accept = Callable[[str, str, Lora, Quota], client_sessions.AdapterRequest]
"""Name, tenant, settings and quota of a client's adapter to what may be created. Blocks; raises RequestError."""


class RequestQueue:
    """``async with RequestQueue(...)``: connected to rank 0, and keeping its tables, inside the block."""

    def __init__(
        self,
        writer: queue_writer.Writer,
        run_folder: RunFolder,
        accept: Accept,
        observed: RunObserver,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._writer, self._folder, self._accept, self._now_s = writer, run_folder, accept, now_s
        self._observed = observed
        self._outbox = Outbox(run_folder, self.change)
        self._answered: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()  # waiters keep them
        self._fetched: set[str] = set()
        self.dropped_samples: set[str] = set()
        """Forgotten soon, not at once: until then a restart may sample them in vain."""
        self._heartbeats = Heartbeats(now_s)
        self.placement = Placement(writer, self.change, observed, self._heartbeats, now_s)
        self._serving: dict[tuple[str, str, str | None], asyncio.Task[str | Pending]] = {}
        self._failed_s: dict[str, float] = {}
        self._start_s = self._forgot_s = now_s()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "RequestQueue":
        for session in await self.change(lambda tx: SESSIONS.select(tx.db, "ended = 0")):
            self._heartbeats.opened(session.session, session.tenant)
        self._tasks = [
            watched_task("queue-link", self._outbox.link.run),
            watched_task("queue-outcomes", self._outbox.receive),
            watched_task("queue-operations", self._outbox.pump),
            watched_task("queue-keeping", self._keep),
        ]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def change(self, work: Callable[[Transaction], T]) -> T:
        """``work``'s result once it is durable; then callers that wait for what it changed are woken."""
        result, tx = await self._writer.change(work, self._now_s())
        self._heartbeats.ended(tx.ended)
        for path in tx.forgotten:
            self.placement.used_s.pop(path, None)
        for request in tx.answered:
            if (event := self._answered.get(request)) is not None:
                event.set()
        for adapter in tx.moved:
            self._outbox.moved(adapter)
        return result

    async def open_session(self, tenant: str, about: bytes = b"") -> str:
        session = await self.change(lambda tx: client_sessions.open_session(tx, tenant, about))
        self._heartbeats.opened(session, tenant)
        return session

    async def heartbeat(self, tenant: str, session: str) -> None:
        """The session is not silent. Raises RequestError, with status 410 once it has ended."""
        if not self._heartbeats.received(session, tenant):
            await self.change(lambda tx: tx.session(tenant, session))

    async def end_session(self, tenant: str, session: str) -> None:
        await self.change(lambda tx: client_sessions.end_session(tx, tx.session(tenant, session).session))

    async def create_model(self, tenant: str, session: str, model_seq: int, mark: str, action: CreateModel) -> str:
        """Make the model ``SESSION:train:MODEL_SEQ``; returns the request, answered once the trainer has it."""
        request = f"{model_id(session, model_seq)}:create"

        def lora_of(tx: Transaction) -> Lora | None:
            tx.session(tenant, session)
            if sequencer.known(tx, request, mark):
                return None
            lora = tx.state(tenant, action.load.path).lora if action.load is not None else action.lora
            if lora is None:
                raise RequestError("lora_config", "it is missing", "give the settings of the model")
            self.placement.check_own(tx, tenant, session)
            return lora

        if (lora := await self.change(lora_of)) is None:
            return request
        name, quota = f"{session}-{model_seq}", self._writer.tables.quotas[tenant]
        adapter = await asyncio.to_thread(self._accept, name, tenant, lora, quota)
        model = (session, model_seq, mark, action, lora)
        async with self.placement.lock:
            await self.placement.make_room(tenant)
            await self.change(lambda tx: client_sessions.insert_model(tx, tenant, adapter, *model))
        return request

    async def unload(self, tenant: str, model: str) -> str:
        """The model's adapter leaves; saved states stay. Returns the request."""
        return await self.change(lambda tx: client_sessions.unload(tx, tenant, model))

    async def submit(self, tenant: str, model: str, seq: int, mark: str, action: ModelAction) -> str:
        """Take a request of ``model``, or find it taken by its fingerprint ``mark``; returns its id (`ordering`)."""
        self._heartbeats.received(model.partition(":")[0], tenant)  # as good as a heartbeat
        return await self.change(lambda tx: sequencer.submit(tx, tenant, model, seq, mark, action))

    async def outcome(self, tenant: str, request: str, wait_s: float) -> Answer | Pending:
        """The answer of a request, waited for at most ``wait_s``."""
        self._heartbeats.received(request.partition(":")[0], tenant)  # as good as a heartbeat
        event = self._answered.setdefault(request, asyncio.Event())
        found = await self._look(tenant, request)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while isinstance(found, Pending):
                    await event.wait()
                    found = await self._look(tenant, request)
        if not isinstance(found, Pending):
            self._fetched.add(request)
        return found

    async def _look(self, tenant: str, request: str) -> Answer | Pending:
        found, adapter = await self.change(lambda tx: sequencer.look(tx, tenant, request))
        if isinstance(found, Pending):
            seen = self._observed.of(adapter)
            if seen.phase is None:
                return Pending(reason="the adapter waits for the trainer", capacity=True)
            if seen.phase is AdapterPhase.PENDING:
                return Pending(reason=f"{seen.reason}{self.placement.own(tenant)}", capacity=True)
            if seen.phase is AdapterPhase.PAUSED:
                return Pending(reason="the adapter is paused")
        return found

    async def serve(self, tenant: str, sampler: str, missing: str | None = None) -> str | Pending:
        """Under which name servers have what the sampling session samples; empty for the base.

        ``missing`` is a name that this call gave before and that no server has. A snapshot that is no longer the newest
        version of its model is served by an adapter of its own, for which the session waits. All samples of a session
        that wait share one look-up, and its result for `SHARED_S`.
        """
        key = (tenant, sampler, missing)
        if (look_up := self._serving.get(key)) is None:
            look_up = self._serving[key] = asyncio.create_task(self._serve(tenant, sampler, missing))
            forget, loop = partial(self._serving.pop, key), asyncio.get_running_loop()
            look_up.add_done_callback(lambda _: loop.call_later(SHARED_S, forget))
        return await asyncio.shield(look_up)

    async def _serve(self, tenant: str, sampler: str, missing: str | None) -> str | Pending:
        def served(tx: Transaction) -> tuple[str | Pending | SavedState | RequestError, str | None]:
            return client_sessions.served(tx, tenant, sampler, missing), tx.sampler(tenant, sampler).path

        found, path = await self.change(served)
        if path is not None:
            self.placement.used_s[path] = self._now_s()
        if isinstance(found, RequestError):
            raise found
        if not isinstance(found, SavedState):
            return found
        loading = Pending(reason="the weights are loaded again", capacity=True)
        async with self.placement.lock:
            if await self.change(lambda tx: tx.models("of_state = ? AND removed = 0", found.path)):
                return loading
            if not fits(await self.placement.make_room(tenant)):
                session, key = sampler.partition(":")[0], "sampling_session_id"
                await self.change(lambda tx: self.placement.check_own(tx, tenant, session, key))
                return Pending(reason="no server has a place for the weights at present", capacity=True)
            name, quota = f"snapshot-{secrets.token_hex(6)}", self._writer.tables.quotas[tenant]
            adapter = await asyncio.to_thread(self._accept, name, tenant, found.lora, quota)
            await self.change(lambda tx: client_sessions.insert_snapshot(tx, tenant, adapter, found))
        return loading

    async def keep_sample(self, tenant: str, sampler: str, sample: str, mark: str, body: bytes) -> None:
        """A sample is acknowledged: until it is among ``dropped_samples``, `client_sessions.kept_samples` has it."""
        self._heartbeats.received(sampler.partition(":")[0], tenant)  # as good as a heartbeat
        self.dropped_samples.discard(sample)
        await self.change(lambda tx: client_sessions.keep_sample(tx, tenant, sampler, sample, mark, body))

    async def _keep(self) -> None:
        while True:
            start_s = time.time()
            try:
                await self.keep()
            except Unavailable as error:
                log.warning("%s; repeated in %g s", error, EVERY_S)
            await asyncio.sleep(EVERY_S)
            if time.time() - start_s > LAPSE_S:
                self._heartbeats.renew()
                self._start_s = self._now_s()

    async def keep(self) -> None:
        """One round of upkeep (`queue_writer`)."""
        now, phases = self._now_s(), self._observed.phases()
        has_failed = [key for key, phase in phases.items() if phase is AdapterPhase.FAILED]
        self._failed_s = {key: self._failed_s.get(key, now) for key in has_failed}
        long = [key for key, at_s in self._failed_s.items() if now - at_s >= FAILED_S]
        failed = {key: self._observed.of(key).reason for key in long}
        await self.change(partial(queue_writer.follow, failed=failed))
        for session in self._heartbeats.silent(SILENT_S):
            await self.change(partial(client_sessions.end_session, session=session))
        await self.change(queue_writer.seal)
        expire = partial(queue_writer.expire_states, used_s=self.placement.used_s, start_s=self._start_s)
        await self.change(expire)
        states = await self.change(queue_writer.drop_states)
        for adapter, label in states:
            await asyncio.to_thread(shutil.rmtree, self._folder.saved_state(adapter, label), ignore_errors=True)
        await self.change(partial(queue_writer.dropped, states=states))
        if abs(now - self._forgot_s) >= FORGET_S:  # the clock may be set back
            self._forgot_s, fetched, self._fetched = now, self._fetched, set()
            await self.change(partial(queue_writer.forget, fetched=fetched))
        dropped, self.dropped_samples = self.dropped_samples, set()
        await self.change(partial(client_sessions.drop_samples, samples=dropped))
        await self.placement.make_room_for_waiting()


class Outbox:
    """The service's side of ordered delivery: sends rank 0 what is due of each adapter, stores what comes of it.

    Expects n              -> everything from n on is sent, at most `ordering.AHEAD` operations before their outcomes
    OperationCompletion n  -> it is stored, then acknowledged
    Durable n              -> the log is cut

    ``link.run``, ``receive`` and ``pump`` are tasks. ``moved`` reports that an adapter has new operations.
    """

    def __init__(self, run_folder: RunFolder, change: Change) -> None:
        self._change = change
        self._next: dict[str, int] = {}
        """The number to send next, of each adapter that the trainer has named over this connection."""
        self._incoming: asyncio.Queue[ToService] = asyncio.Queue()
        self.link = ServiceEnd(run_folder, self._incoming.put_nowait)
        self._due: set[str] = set()
        self._wake = asyncio.Event()

    def moved(self, adapter: str) -> None:
        self._due.add(adapter)
        self._wake.set()

    async def receive(self) -> None:
        while True:
            match await self._incoming.get():
                case OperationCompletion(adapter=adapter, number=number, outcome=outcome):
                    kept = partial(sequencer.completed, adapter=adapter, number=number, outcome=outcome)
                    await self._until_done(kept)
                    reached("queue.acknowledging")
                    await self.link.send(Acknowledgement(adapter=adapter, number=number))
                    if adapter in self._next:  # another connection may have sent it
                        self._next[adapter] = max(self._next[adapter], number + 1)
                    self.moved(adapter)
                case Durable(adapter=adapter, number=number):
                    await self._until_done(partial(sequencer.durable, adapter=adapter, number=number))
                case Expects(adapter=adapter, number=number):
                    self._next.pop(adapter, None)
                    if await self._until_done(partial(sequencer.expected, adapter=adapter, number=number)):
                        self._next[adapter] = number
                        self.moved(adapter)

    async def pump(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            due, self._due = self._due, set()
            for adapter in sorted(due):
                if (start := self._next.get(adapter)) is None:
                    continue
                for operation in await self._until_done(partial(sequencer.to_send, adapter=adapter, start=start)):
                    if self._next.get(adapter) != operation.number:
                        break  # the trainer was restarted meanwhile
                    self._next[adapter] += 1
                    reached("queue.sending")
                    await self.link.send(operation)

    async def _until_done(self, work: Callable[[Transaction], T]) -> T:
        """As `RequestQueue.change`, repeated while the service's file is not available."""
        while True:
            try:
                return await self._change(work)
            except Unavailable as error:
                log.warning("%s; repeated in %g s", error, EVERY_S)
                await asyncio.sleep(EVERY_S)

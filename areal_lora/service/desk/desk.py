"""What SDK clients ask of their models: taken durably, carried out in order, answered once.

    submit -> file -> courier -> trainer rank 0 -> courier -> file -> outcome
    create_model, serve -> rows of the desired state -> the trainer has the adapter

Every call raises `Refused`; what is another tenant's is answered like what does not exist. What a call returns is
durable. All changes are made by the service's one writer thread.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from areal_lora.config.models import Config
from areal_lora.config.sizing.slots import adapter_capacity
from areal_lora.operations.messages import Operation, Outcome
from areal_lora.operations.outbox import Outbox
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.desk import keeping, numbers, requests, samples
from areal_lora.service.desk import models as made
from areal_lora.service.desk.asks import Answer, CreateModel, Lora, OfModel, Pending, Serve
from areal_lora.service.desk.books import Books
from areal_lora.service.desk.places import Places, Snapshot, abandoned, evicted, fits
from areal_lora.service.desk.rows import Model, Sampler, Saved, model_id
from areal_lora.service.desk.signs import DEAD_S, SILENT_S, Signs
from areal_lora.service.observed import Observed, Seen
from areal_lora.service.plan import Asked, change, create
from areal_lora.service.refused import Refused, Unavailable
from areal_lora.service.rows import AdapterRow, Quota, Tables, Verb
from areal_lora.service.writer import Order, Writer
from areal_lora.types import AdapterPhase

log = get_logger(__name__)

EVERY_S = 1.0
LAPSE_S = 10.0
"""A longer time between two rounds of `keep`: the machine slept, or the process was stopped."""
SHARED_S = 0.25
MOST_NAMES = 8
FAILED_S = 10.0
"""An adapter that has failed may still have outcomes on their way."""
OVER = (AdapterPhase.DONE, AdapterPhase.FAILED, AdapterPhase.DELETED)
T = TypeVar("T")
Accept = Callable[[str, str, Lora, Quota], Asked]
"""Name, tenant, settings and quota of a client's adapter to what may be created. Blocks; raises Refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the desk sees of the run: the newest of each adapter, all of them, and how many fit on the servers."""

    seen: Callable[[str], Seen]
    phases: Callable[[], Mapping[str, AdapterPhase]]
    configured: frozenset[str]
    capacity: int

    @classmethod
    def of(cls, config: Config, observed: Observed) -> Surroundings:
        return cls(
            seen=observed.of,
            phases=observed.phases,
            configured=frozenset(adapter.name for adapter in config.adapters),
            capacity=adapter_capacity(config),
        )


class Desk:
    """``async with Desk(...)``: connected to rank 0, and keeping its tables, inside the block."""

    def __init__(
        self,
        writer: Writer,
        run_folder: RunFolder,
        accept: Accept,
        around: Surroundings,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._writer, self._folder, self._accept, self._around, self._now_s = writer, run_folder, accept, around, now_s
        self._outbox = Outbox(run_folder, self)
        self._answered: dict[str, asyncio.Event] = {}
        self._waiting: Counter[str] = Counter()
        self._fetched: set[str] = set()
        self._dropped_samples: set[str] = set()
        self._signs = Signs(now_s)
        self._used_s: dict[str, float] = {}
        self._serving: dict[tuple[str, str, str | None], asyncio.Task[Serve | Pending]] = {}
        self._failed_s: dict[str, float] = {}
        self._begin_s = now_s()
        self._placing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Desk:
        for session in await self._change(lambda books: books.sessions("ended = 0")):
            self._signs.opened(session.session, session.tenant)
        self._tasks = [
            watched_task("desk-link", self._outbox.run),
            watched_task("desk-outcomes", self._outbox.receive),
            watched_task("desk-operations", self._outbox.pump),
            watched_task("desk-keeping", self._keep),
        ]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    # ------------------------------------------------------------ sessions and models

    async def open_session(self, tenant: str, about: bytes = b"") -> str:
        session = await self._change(lambda books: made.open_session(books, tenant, about))
        self._signs.opened(session, tenant)
        return session

    async def crowded(self, tenant: str) -> str:
        """Why a new model of the tenant would have to wait; empty if there is a place, or a silent client has one."""
        places = self._places(tenant)
        if fits(places) or abandoned(places, await self._silent_with_models(), tenant):
            return ""
        what = f"the quota of {places.quota} adapters is used"
        if places.mine < places.quota:
            what = f"all {places.capacity} places of the servers are taken"
        return f"{what}{self._own(tenant)}"

    async def heartbeat(self, tenant: str, session: str) -> None:
        """The session is not silent. Raises Refused, with status 410 once it has ended."""
        if not self._signs.heard(session, tenant):
            await self._change(lambda books: books.session(tenant, session))

    def _sign(self, tenant: str, name: str) -> None:
        """A request of a model or sampler, whose ``name`` begins with its session's, is as good as a heartbeat."""
        self._signs.heard(name.partition(":")[0], tenant)

    async def end_session(self, tenant: str, session: str) -> None:
        """Its models leave; saved states stay."""

        def end(books: Books) -> None:
            books.session(tenant, session)
            made.end_session(books, session)

        await self._change(end)
        await self._let_leave()

    async def create_model(self, tenant: str, session: str, model_seq: int, fingerprint: str, ask: CreateModel) -> str:
        """Make the model ``SESSION:train:MODEL_SEQ``; returns the request, answered once the trainer has it."""
        if not 0 <= model_seq < 1 << 31:
            raise Refused(422, "model_seq_id", f"{model_seq} is no number of a model", "count from 0")
        request = f"{model_id(session, model_seq)}:create"

        def begin(books: Books) -> Lora | None:
            books.session(tenant, session)
            if requests.known(books, request, fingerprint):
                return None
            lora = books.state(tenant, ask.load.path).lora if ask.load is not None else ask.lora
            if lora is None:
                raise Refused(422, "lora_config", "it is missing", "give the settings of the model")
            self._check_own_places(books, tenant, session)
            return lora

        if (lora := await self._change(begin)) is None:
            return request
        name, quota = made.name_of(session, model_seq), self._writer.tables.quotas[tenant]
        asked = await asyncio.to_thread(self._accept, name, tenant, lora, quota)

        def also(db: sqlite3.Connection, row: AdapterRow) -> None:
            made.insert_model(
                self._books(db, self._writer.tables), row, session, model_seq, request, fingerprint, ask, lora
            )

        async with self._placing:
            await self._make_room(tenant)
            await self._writer.operate(
                self._creates(tenant, asked, also, request=f"\n{request}", fingerprint=fingerprint)
            )
        return request

    async def unload(self, tenant: str, model: str) -> str:
        """The model's adapter leaves; saved states stay. Returns the request."""
        request = await self._change(lambda books: made.unload(books, tenant, model))
        await self._let_leave()
        return request

    async def model(self, tenant: str, model: str) -> Model:
        return await self._change(lambda books: books.model(tenant, model))

    async def look_up(self, work: Callable[[Books], T]) -> T:
        """What ``work``, one of `listing`, finds."""
        return await self._change(work)

    # ------------------------------------------------------------ requests

    async def submit(self, tenant: str, model: str, seq: int, fingerprint: str, ask: OfModel) -> str:
        """Take a request of ``model``; returns its id.

        Requests are carried out in the order of ``seq``, which counts from 1, however they arrive. The same ``seq``
        and ``fingerprint`` is the same request; another fingerprint is refused. A number that never comes is passed
        over after `order.GAP_S`, and the window that it would have been in fails.
        """
        self._sign(tenant, model)
        return await self._change(lambda books: requests.submit(books, tenant, model, seq, fingerprint, ask))

    async def outcome(self, tenant: str, request: str, wait_s: float) -> Answer | Pending:
        """The answer of a request, waited for at most ``wait_s``."""
        self._sign(tenant, request)
        deadline = time.monotonic() + wait_s
        found = await self._look(tenant, request)
        if isinstance(found, Pending) and wait_s > 0:
            event = self._answered.setdefault(request, asyncio.Event())
            self._waiting[request] += 1
            try:
                while isinstance(found := await self._look(tenant, request), Pending):
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await event.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting[request] -= 1
                if not self._waiting[request]:
                    del self._waiting[request], self._answered[request]
        if not isinstance(found, Pending):
            self._fetched.add(request)
        return found

    # ------------------------------------------------------------ saved states and sampling

    async def saved(self, tenant: str, model: str | None = None) -> list[Saved]:
        """The tenant's named states, oldest first; with ``model`` of this one, which may be gone."""
        return await self._change(
            lambda books: books.states(
                "tenant = ? AND named = 1 AND (expires_s IS NULL OR expires_s > ?) AND model = COALESCE(?, model)",
                tenant,
                books.now_s,
                model,
            )
        )

    async def saved_at(self, tenant: str, path: str) -> Saved:
        return await self._change(lambda books: books.state(tenant, path))

    async def set_ttl(self, tenant: str, path: str, ttl_s: float | None) -> Saved:
        """The state stays for ``ttl_s`` seconds from now; None: for ever."""
        requests.check_ttl(ttl_s)

        def keep(books: Books) -> Saved:
            state = books.state(tenant, path)
            until = None if ttl_s is None else books.now_s + ttl_s
            books.do(
                "UPDATE saved_states SET expires_s = ? WHERE adapter = ? AND label = ?",
                until,
                state.adapter,
                state.label,
            )
            return books.state(tenant, path)

        return await self._change(keep)

    async def drop(self, tenant: str, path: str) -> None:
        """Delete a saved state; its sampling sessions end."""
        await self._change(lambda books: made.expire(books, books.state(tenant, path)))

    async def open_sampler(self, tenant: str, session: str, sampler_seq: int, path: str | None) -> str:
        """A sampling session of the saved state ``path``, or of the base; returns its id."""
        return await self._change(lambda books: made.open_sampler(books, tenant, session, sampler_seq, path))

    async def sampler(self, tenant: str, sampler: str) -> Sampler:
        return await self._change(lambda books: books.sampler(tenant, sampler))

    async def serve(self, tenant: str, sampler: str, missing: str | None = None) -> Serve | Pending:
        """Under which name servers have what the sampling session samples.

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

    async def _serve(self, tenant: str, sampler: str, missing: str | None) -> Serve | Pending:
        def served(books: Books) -> tuple[Serve | Pending | Saved, str | None]:
            return made.served(books, tenant, sampler, missing), books.sampler(tenant, sampler).path

        found, path = await self._change(served)
        if path is not None:
            self._used_s[path] = self._now_s()
        return await self._serve_snapshot(tenant, found) if isinstance(found, Saved) else found

    async def _serve_snapshot(self, tenant: str, state: Saved) -> Pending:
        async with self._placing:
            there = await self._change(lambda books: books.models("of_state = ? AND gone = 0", state.path))
            if there:
                return Pending(reason="the weights are loaded again", capacity=True)
            places = await self._make_room(tenant)
            if not fits(places):
                return Pending(reason="no server has a place for the weights at present", capacity=True)
            name = made.snapshot_name()
            asked = await asyncio.to_thread(self._accept, name, tenant, state.lora, self._writer.tables.quotas[tenant])

            def also(db: sqlite3.Connection, row: AdapterRow) -> None:
                made.insert_snapshot(self._books(db, self._writer.tables), row, state)

            await self._writer.operate(self._creates(tenant, asked, also))
        return Pending(reason="the weights are loaded again", capacity=True)

    async def keep_sample(self, tenant: str, sampler: str, sample: str, fingerprint: str, ask: bytes) -> None:
        """A sample is acknowledged: until it is dropped, `kept_samples` has it."""
        self._sign(tenant, sampler)
        self._dropped_samples.discard(sample)
        await self._change(lambda books: samples.keep(books, tenant, sampler, sample, fingerprint, ask))

    async def kept_samples(self) -> list[samples.KeptSample]:
        return await self._change(samples.kept)

    def drop_sample(self, sample: str) -> None:
        """Soon, not at once: until then a restart may sample it in vain."""
        self._dropped_samples.add(sample)

    # ------------------------------------------------------------ for the courier

    async def expected(self, adapter: str, number: int) -> bool:
        return await self._until_done(lambda books: numbers.expected(books, adapter, number))

    async def completed(self, adapter: str, number: int, outcome: Outcome) -> None:
        await self._until_done(lambda books: numbers.completed(books, adapter, number, outcome))

    async def to_send(self, adapter: str, start: int, limit: int) -> list[Operation]:
        return await self._until_done(lambda books: numbers.to_send(books, adapter, start, limit))

    # ------------------------------------------------------------ inside

    def _books(self, db: sqlite3.Connection, tables: Tables) -> Books:
        return Books(db=db, now_s=self._now_s(), tables=tables)

    async def _change(self, work: Callable[[Books], T]) -> T:
        """``work``'s result once it is durable; then those who wait for what it changed are woken."""

        def job(db: sqlite3.Connection, tables: Tables) -> tuple[T, Books]:
            books = self._books(db, tables)
            return work(books), books

        result, books = await self._writer.change(job)
        self._signs.ended(books.ended)
        for path in books.forgotten:
            self._used_s.pop(path, None)
        for request in books.answered & self._answered.keys():
            self._answered[request].set()
        for adapter in books.moved:
            self._outbox.moved(adapter)
        return result

    async def _until_done(self, work: Callable[[Books], T]) -> T:
        """As ``_change``, repeated while the service's file is not available."""
        while True:
            try:
                return await self._change(work)
            except Unavailable as error:
                log.warning("%s; repeated in %g s", error, EVERY_S)
                await asyncio.sleep(EVERY_S)

    async def _look(self, tenant: str, request: str) -> Answer | Pending:
        found, adapter = await self._change(lambda books: requests.look(books, tenant, request))
        if isinstance(found, Pending):
            seen = self._around.seen(adapter)
            if seen.phase is None:
                return Pending(reason="the adapter waits for the trainer", capacity=True)
            if seen.phase is AdapterPhase.PENDING:
                return Pending(reason=f"{seen.reason}{self._own(tenant)}", capacity=True)
            if seen.phase is AdapterPhase.PAUSED:
                return Pending(reason="the adapter is paused")
        return found

    def _creates(
        self,
        tenant: str,
        asked: Asked,
        also: Callable[[sqlite3.Connection, AdapterRow], None],
        request: str = "",
        fingerprint: str = "",
    ) -> Order:
        return Order(
            tenant=tenant,
            verb=Verb.CREATE,
            fingerprint=fingerprint,
            request=request,
            decide=lambda tables, _: create(tables, tenant, asked, now_s=self._now_s()),
            answer=lambda row: row.key.encode(),
            also=also,
        )

    def _check_own_places(self, books: Books, tenant: str, session: str) -> None:
        """Raises Refused where the session's own models have every place for which another one of it would wait."""
        phases, quota = self._around.phases(), books.quota(tenant).adapters
        own = books.models("session = ? AND gone = 0", session)
        if len(own) >= quota or sum(phases.get(each.adapter) not in OVER for each in own) >= self._around.capacity:
            reason = f"the {len(own)} models of this session have every place that it can have"
            fix = f"delete the adapter of one that is done (areal-lora adapters delete RUN {own[0].name})"
            raise Refused(422, "model_seq_id", reason, fix)

    def _own(self, tenant: str) -> str:
        """The tenant's adapters that have a place or are new, and how to free one; empty if it has none."""
        phases, without = self._around.phases(), (*OVER, AdapterPhase.PENDING)
        names = [row.name for row in self._writer.tables.of(tenant) if phases.get(row.key) not in without]
        if not names:
            return ""
        shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
        return f"; yours are {shown} (fix: close their clients, or areal-lora adapters delete RUN {names[0]})"

    async def _make_room(self, tenant: str, *, waits: bool = False) -> Places:
        """Free the place that the tenant's next adapter needs: a snapshot leaves that is not in use, or a session ends
        whose client is silent. With ``waits`` that adapter is there already.
        """
        found = await self._change(lambda books: books.models("of_state IS NOT NULL AND gone = 0"))
        snapshots = [
            Snapshot(model=each.model, tenant=each.tenant, used_s=self._used_s.get(each.of_state or "", each.created_s))
            for each in found
        ]
        places = self._places(tenant, waits=waits)
        if (model := evicted(places, snapshots, tenant, self._now_s())) is not None:
            await self._change(lambda books: made.evict(books, model))
            await self._let_leave()
        elif (session := abandoned(places, await self._silent_with_models(), tenant)) is not None:
            log.info("session %s ends: its client is silent for more than %g s, and another one waits", session, DEAD_S)
            await self._change(lambda books: made.end_session(books, session))
            await self._let_leave()
        return self._places(tenant, waits=waits)

    async def _silent_with_models(self) -> list[tuple[str, str]]:
        if not (silent := self._signs.silent(DEAD_S)):
            return []
        tenants = await self._change(made.sessions_with_models)
        return [(session, tenants[session]) for session in silent if session in tenants]

    def _places(self, tenant: str, *, waits: bool = False) -> Places:
        tables, phases = self._writer.tables, self._around.phases()
        joined = sum(phases.get(row.key) not in OVER for row in tables.adapters.values())
        configured = sum(phases.get(name) not in OVER for name in self._around.configured)
        return Places(
            taken=joined + configured - waits,
            capacity=self._around.capacity,
            mine=len(tables.of(tenant)) - waits,
            quota=tables.quotas[tenant].adapters,
        )

    async def _let_leave(self) -> None:
        """Take adapters of models that are gone out of the desired state."""
        keys = msgspec.json.encode([row.key for row in self._writer.tables.adapters.values()]).decode()
        gone = "gone = 1 AND adapter IN (SELECT value FROM json_each(?))"
        for model in await self._change(lambda books: books.models(gone, keys)):
            await self._writer.operate(_deletes(model))

    async def _keep(self) -> None:
        while True:
            begin_s = time.time()
            try:
                await self.keep()
            except Unavailable as error:
                log.warning("%s; repeated in %g s", error, EVERY_S)
            await asyncio.sleep(EVERY_S)
            if time.time() - begin_s > LAPSE_S:
                self._signs.renew()

    async def keep(self) -> None:
        """What the desk does by itself, once."""
        await self._change(partial(keeping.follow, failed=self._failed()))
        if silent := self._signs.silent(SILENT_S):
            await self._change(partial(keeping.end_silent, silent=silent))
        await self._let_leave()
        await self._change(keeping.seal)
        await self._change(partial(keeping.expire_states, used_s=self._used_s, begin_s=self._begin_s))
        for adapter, label in await self._change(keeping.drop_states):
            await asyncio.to_thread(shutil.rmtree, self._folder.saved_state(adapter, label), ignore_errors=True)
            await self._change(partial(keeping.dropped, adapter=adapter, label=label))
        fetched, self._fetched = self._fetched, set()
        await self._change(partial(keeping.forget, fetched=fetched))
        dropped, self._dropped_samples = self._dropped_samples, set()
        await self._change(partial(samples.drop, samples=dropped))
        await self._make_room_for_waiting()

    async def _make_room_for_waiting(self) -> None:
        """An adapter that waits for a place comes before what is not in use, unless its own client is silent."""
        for row in self._writer.tables.adapters.values():
            if self._around.seen(row.key).phase is not AdapterPhase.PENDING:
                continue
            model = await self._change(partial(Books.of_adapter, adapter=row.key))
            if model is None or (model.of_state is None and model.session not in self._signs.silent(DEAD_S)):
                async with self._placing:
                    await self._make_room(row.tenant, waits=True)
                return

    def _failed(self) -> dict[str, str]:
        """Adapters that have failed for `FAILED_S`, with the reason."""
        now = self._now_s()
        failed = {key for key, phase in self._around.phases().items() if phase is AdapterPhase.FAILED}
        self._failed_s = {key: self._failed_s.get(key, now) for key in failed}
        return {key: self._around.seen(key).reason for key, at in self._failed_s.items() if now - at >= FAILED_S}


def _deletes(model: Model) -> Order:
    return Order(
        tenant=model.tenant,
        verb=Verb.DELETE,
        fingerprint="",
        decide=lambda tables, phases: change(tables, phases, model.tenant, model.name, Verb.DELETE),
        answer=lambda row: b"",
    )

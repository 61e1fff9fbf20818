"""What the run has, and which adapter leaves so that another one has its place on the servers.

A snapshot that is not the newest version of its model is served by an adapter of its own. It takes a place on the
servers and counts to the quota of its tenant, like any adapter. The one that was not used for longest leaves first.
Where none can leave, the session leaves whose client has been silent for longest.

`RunObserver` has the records of ``metrics.jsonl`` by adapter, read as they come.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from areal_lora.errors import RequestError
from areal_lora.obs.metrics import records
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.events import whole_lines
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.queue.client_sessions import end_session, leave
from areal_lora.service.queue.queue_store import Transaction
from areal_lora.service.queue.queue_writer import Writer
from areal_lora.types import AdapterPhase

log = get_logger(__name__)

OWN_IDLE_S = 10.0
OTHERS_IDLE_S = 60.0
"""A tenant's snapshot leaves for another tenant's adapter only after that long without use."""
SILENT_S = 3600.0  # a session without a heartbeat for that long ends
DEAD_S = 45.0
"""It ends after that long if another client waits for its places: the SDK sends a heartbeat every 10 s."""
MAX_NAMES = 8
OVER = (AdapterPhase.DONE, AdapterPhase.FAILED, AdapterPhase.DELETED)
T = TypeVar("T")


class SnapshotAdapter(NamedTuple):
    """An adapter that serves a saved state, and the time of its last use."""

    used_s: float
    model: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """``taken`` of ``capacity`` places on the servers, and ``mine`` of the tenant's ``quota``, have an adapter."""

    taken: int
    capacity: int
    mine: int
    quota: int


def evicted(places: Places, snapshots: Sequence[SnapshotAdapter], tenant: str, now_s: float) -> str | None:
    """The model that leaves so that ``tenant`` may have one more adapter; None if there is room, or none can leave."""
    if fits(places):
        return None
    own = [each for each in snapshots if each.tenant == tenant and now_s - each.used_s >= OWN_IDLE_S]
    others = [each for each in snapshots if each.tenant != tenant and now_s - each.used_s >= OTHERS_IDLE_S]
    oldest = min(own or (others if places.mine < places.quota else []), default=None)
    return None if oldest is None else oldest.model


def abandoned(places: Places, sessions: Sequence[tuple[str, str]], tenant: str) -> str | None:
    """The session that ends so that ``tenant`` may have one more adapter.

    ``sessions`` are those with adapters whose clients are silent, with their tenants, the longest silent first.
    """
    if fits(places):
        return None
    return next((name for name, owner in sessions if owner == tenant or places.mine < places.quota), None)


def fits(places: Places) -> bool:
    return places.mine < places.quota and places.taken < places.capacity


class Heartbeats:
    """When clients of open sessions were last there.

    In memory: after a restart of the service every open session counts from the start, so that its downtime ends none.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last: dict[str, tuple[str, float]] = {}

    def opened(self, session: str, tenant: str) -> None:
        self._last[session] = (tenant, self._now_s())

    def received(self, session: str, tenant: str) -> bool:
        """False for a session that is not open, or not the tenant's."""
        known = session in self._last and self._last[session][0] == tenant
        if known:
            self.opened(session, tenant)
        return known

    def ended(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self._last.pop(session, None)

    def renew(self) -> None:
        """The service itself was stopped: no client could send one."""
        for session, (tenant, _) in list(self._last.items()):
            self.opened(session, tenant)

    def silent(self, for_s: float) -> list[str]:
        """Sessions without a heartbeat for longer than ``for_s``, the longest silent first."""
        now = self._now_s()
        found = [(at, session) for session, (_, at) in self._last.items() if now - at > for_s]
        return [session for _, session in sorted(found)]


class Change(Protocol):
    """The result of a transaction once it is durable."""

    def __call__(self, work: Callable[[Transaction], T], /) -> Awaitable[T]: ...


class Placement:
    """Makes room on the servers. ``used_s``: when a saved state was sampled last, by its path."""

    def __init__(
        self, writer: Writer, change: Change, observed: RunObserver, heartbeats: Heartbeats, now_s: Callable[[], float]
    ) -> None:
        self._writer, self._change, self._observed, self._now_s = writer, change, observed, now_s
        self._heartbeats = heartbeats
        self.used_s: dict[str, float] = {}
        self.lock = asyncio.Lock()
        """Held from making room until the adapter that takes it is there."""

    async def crowded(self, tenant: str) -> str:
        """Why a new model of the tenant would have to wait; empty if there is a place, or a silent client has one."""
        places = self._places(tenant)
        if fits(places) or abandoned(places, await self._silent_with_models(), tenant):
            return ""
        taken = f"all {places.capacity} places of the servers are taken"
        what = taken if places.mine < places.quota else f"the quota of {places.quota} adapters is used"
        return f"{what}{self.own(tenant)}"

    def check_own(self, tx: Transaction, tenant: str, session: str, path: str = "model_seq_id") -> None:
        """Raises RequestError where the session's own models have every place that one more adapter would wait for."""
        phases, quota = self._observed.phases(), tx.quota(tenant).adapters
        own = tx.models("session = ? AND removed = 0", session)
        if len(own) >= quota or sum(phases.get(each.adapter) not in OVER for each in own) >= self._observed.capacity:
            reason = f"the {len(own)} models of this session have every place that it can have"
            fix = f"delete the adapter of one that is done (areal-lora adapters delete RUN {own[0].name})"
            raise RequestError(path, reason, fix)

    def own(self, tenant: str) -> str:
        """The tenant's adapters that have a place or are new, and how to free one; empty if it has none."""
        phases, without = self._observed.phases(), (*OVER, AdapterPhase.PENDING)
        names = [row.name for row in self._writer.tables.of(tenant) if phases.get(row.key) not in without]
        if not names:
            return ""
        shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
        return f"; yours are {shown} (fix: close their clients, or areal-lora adapters delete RUN {names[0]})"

    async def make_room(self, tenant: str, *, waits: bool = False) -> Places:
        """Free the place that the tenant's next adapter needs: a snapshot leaves that is not in use, or a session ends
        whose client is silent. With ``waits`` that adapter is there already.
        """
        found = await self._change(lambda tx: tx.models("of_state IS NOT NULL AND removed = 0"))
        used_s = {each.model: self.used_s.get(each.of_state or "", each.created_s) for each in found}
        snapshots = [SnapshotAdapter(used_s[each.model], each.model, each.tenant) for each in found]
        places = self._places(tenant, waits=waits)
        if (model := evicted(places, snapshots, tenant, self._now_s())) is not None:

            def evict(tx: Transaction) -> None:
                for each in tx.models("model = ? AND removed = 0", model):
                    leave(tx, each, "its place is needed")

            await self._change(evict)
        elif (session := abandoned(places, await self._silent_with_models(), tenant)) is not None:
            log.info("session %s ends: its client is silent for more than %g s, and another one waits", session, DEAD_S)
            await self._change(lambda tx: end_session(tx, session))
        return self._places(tenant, waits=waits)

    async def make_room_for_waiting(self) -> None:
        """An adapter that waits for a place comes before what is not in use, unless its own client is silent."""
        for row in self._writer.tables.adapters.values():
            if self._observed.of(row.key).phase is not AdapterPhase.PENDING:
                continue
            model = await self._change(lambda tx, key=row.key: tx.of_adapter(key))  # type: ignore[misc]
            if model is None or (model.of_state is None and model.session not in self._heartbeats.silent(DEAD_S)):
                async with self.lock:
                    await self.make_room(row.tenant, waits=True)
                return

    async def _silent_with_models(self) -> list[tuple[str, str]]:
        if not (silent := self._heartbeats.silent(DEAD_S)):
            return []
        with_models = "SELECT DISTINCT session, tenant FROM models WHERE removed = 0 AND of_state IS NULL"
        tenants: dict[str, str] = dict(await self._change(lambda tx: tx.rows(with_models)))
        return [(session, tenants[session]) for session in silent if session in tenants]

    def _places(self, tenant: str, *, waits: bool = False) -> Places:
        tables, phases = self._writer.tables, self._observed.phases()
        joined = sum(phases.get(row.key) not in OVER for row in tables.adapters.values())
        configured = sum(phases.get(name) not in OVER for name in self._observed.configured)
        return Places(
            taken=joined + configured - waits,
            capacity=self._observed.capacity,
            mine=len(tables.of(tenant)) - waits,
            quota=tables.quotas[tenant].adapters,
        )


READ_BYTES = 4 << 20
PAGE = 1000  # most records of one answer


_record = msgspec.json.Decoder(records.Record).decode


@dataclass(slots=True)
class ObservedAdapter:
    """One adapter of the run. ``places`` are the offsets of its lines, ``states`` those of its newest state records.

    ``version`` is the newest one that servers hold, ``checkpoint`` the newest one written since the last resume.
    """

    phase: AdapterPhase | None = None
    reason: str = ""
    step: records.StepRecord | None = None
    version: int | None = None
    checkpoint: int | None = None
    places: array[int] = field(default_factory=lambda: array("Q"))
    states: deque[int] = field(default_factory=lambda: deque(maxlen=PAGE))


class RunObserver:
    """Follows one file. ``look`` reads what has come; the rest answers from memory and, for lines, from the file.

    ``configured`` are adapters of the configuration, ``capacity`` is how many adapters fit on the servers.
    """

    def __init__(self, run_folder: RunFolder, configured: Collection[str] = (), capacity: int = 0) -> None:
        self._path, self._at = run_folder.metrics, 0
        self.configured, self.capacity = frozenset(configured), capacity
        self._seen: dict[str, ObservedAdapter] = {}

    def look(self) -> bool:
        """Read new records, at most about ``READ_BYTES``; False where those were all. A torn line stays."""
        end = self._at + READ_BYTES
        with suppress(FileNotFoundError):
            for line in whole_lines(self._path, end, self._at):
                self._take(line, self._at)
                self._at += len(line)
        return self._at >= end

    def of(self, key: str) -> ObservedAdapter:
        return self._seen.get(key) or ObservedAdapter()

    def phases(self) -> dict[str, AdapterPhase]:
        return {key: seen.phase for key, seen in list(self._seen.items()) if seen.phase is not None}

    def records(self, key: str, after: int, limit: int = PAGE) -> list[dict[str, Any]]:
        """The adapter's records from number ``after`` on, without the run's names of adapters."""
        return self._lines(self.of(key).places[after : after + limit])

    def states(self, key: str) -> list[dict[str, Any]]:
        """The newest state records and failures of the adapter, oldest first."""
        return self._lines(self.of(key).states)

    def forget(self, but: Container[str]) -> None:
        """Forget every adapter that is not in ``but``."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in but}

    def _lines(self, places: Iterable[int]) -> list[dict[str, Any]]:
        if not (offsets := list(places)):
            return []
        found = []
        with self._path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                record = msgspec.json.decode(file.readline(), type=dict[str, Any])
                for name_of_the_run in ("adapter", "measured_with"):
                    record.pop(name_of_the_run, None)
                found.append(record)
        return found

    def _take(self, line: bytes, offset: int) -> None:
        record = _record(line)
        if not record.adapter:
            return
        seen = self._seen.setdefault(record.adapter, ObservedAdapter())
        seen.places.append(offset)
        match record:
            case records.AdapterStateRecord(state=phase, reason=reason):
                seen.phase, seen.reason = phase, reason
                seen.states.append(offset)
            case records.StepRecord():
                seen.step = record
            case records.PublishRecord(version=version):
                seen.version = version
            case records.CheckpointRecord(version=version, failed=False):
                seen.checkpoint = version
            case records.ResumeRecord(version=version):
                seen.checkpoint = version
                if seen.step is not None and seen.step.version >= version:
                    seen.step = None  # it will come again

"""Sessions, models, sampling sessions and samples of clients; and the adapters of tenants and of snapshots."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import LoadState, Publish
from areal_lora.processes.watched import reached
from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.service.queue import queue_rows as rows
from areal_lora.service.queue.queue_store import MODELS, SAMPLERS, SAMPLES, SESSIONS, Transaction
from areal_lora.service.queue.requests import ActionResult, CreateModel, Lora, Pending, encode
from areal_lora.service.queue.sequencer import append, check_ttl, fail_open, forget, give, insert, known, load
from areal_lora.types import AdapterPhase

MAX_SESSIONS, MAX_SAMPLERS = 256, 4096  # of a tenant, at a time
UNFETCHED_S = 86400.0
MAX_ANSWERS = 1 << 14  # of a tenant, to idempotency keys


def open_session(tx: Transaction, tenant: str, about: bytes) -> str:
    if tx.count("sessions WHERE tenant = ? AND ended = 0", tenant) >= MAX_SESSIONS:
        reason = f"{MAX_SESSIONS} sessions are open"
        raise RequestError("session_id", reason, "end some, or wait until they end", status=429)
    session = f"s{secrets.token_hex(6)}"
    SESSIONS.insert(tx.db, rows.ClientSession(session=session, tenant=tenant, about=about, created_s=tx.now_s))
    return session


def end_session(tx: Transaction, session: str) -> None:
    """Its models leave; what they saved stays."""
    tx.do("UPDATE sessions SET ended = 1 WHERE session = ?", session)
    tx.ended.add(session)
    for model in tx.models("session = ? AND removed = 0", session):
        leave(tx, model, "its session has ended")
    tx.do("DELETE FROM samples WHERE sampler IN (SELECT sampler FROM samplers WHERE session = ?)", session)
    tx.do("DELETE FROM samplers WHERE session = ?", session)


def leave(tx: Transaction, model: rows.Model, reason: str) -> None:
    """The model is removed, and its adapter deleted."""
    tx.do("UPDATE models SET removed = 1 WHERE model = ?", model.model)
    fail_open(tx, model, reason)
    tx.do("DELETE FROM client_operations WHERE adapter = ?", model.adapter)
    tx.do("UPDATE requests SET action = NULL WHERE owner = ?", model.model)
    row = tx.tables.adapters.get((model.tenant, model.name))
    if row is not None and row.key == model.adapter:
        tx.record(replace(row, wanted=DesiredPhase.DELETED))


def unload(tx: Transaction, tenant: str, model_id: str) -> str:
    """The model leaves, what it saved stays; returns the request, which is answered at once."""
    request = f"{model_id}:unload"
    if not tx.count("requests WHERE request = ? AND tenant = ?", request, tenant):
        leave(tx, tx.model(tenant, model_id), "the model was unloaded")
        insert(tx, tenant, request, model_id, 0, "", b"")
        give(tx, request, ActionResult(model=model_id, unloaded=True))
    return request


def insert_model(
    tx: Transaction,
    tenant: str,
    adapter: "AdapterRequest",
    session: str,
    model_seq: int,
    mark: str,
    action: CreateModel,
    lora: Lora,
) -> None:
    """Make the model and its adapter, and keep the request that makes it; nothing if that was taken before.

    Raises RequestError.
    """
    model = rows.model_id(session, model_seq)
    request = f"{model}:create"
    tx.session(tenant, session)
    if known(tx, request, mark) or tx.count("models WHERE model = ?", model):  # requests are forgotten earlier
        return
    row = _insert_adapter(tx, tenant, adapter)
    MODELS.insert(tx.db, rows.Model.of(row, model=model, session=session, lora=lora, notes=action.notes))
    insert(tx, tenant, request, model, 0, mark, encode(action))
    if action.load is not None:
        append(tx, row.key, request, load(tx, tenant, action.load))


def insert_snapshot(tx: Transaction, tenant: str, adapter: "AdapterRequest", state: rows.SavedState) -> None:
    """Make the model and the adapter that serve ``state``. Raises RequestError."""
    row = _insert_adapter(tx, tenant, adapter)
    model = rows.snapshot_id(row.name, state.label)
    made = rows.Model.of(row, model=model, session="", lora=state.lora, of_state=state.path)
    MODELS.insert(tx.db, made)
    append(tx, row.key, "", LoadState(adapter=state.adapter, label=state.label, optimizer=False))
    append(tx, row.key, "", Publish())


def _insert_adapter(tx: Transaction, tenant: str, adapter: "AdapterRequest") -> rows.AdapterRow:
    row = create(tx.tables, tenant, adapter, now_s=tx.now_s)
    tx.record(row)
    return row


def open_sampler(tx: Transaction, tenant: str, session: str, seq: int, path: str | None) -> str:
    tx.session(tenant, session)
    if path is not None:
        tx.state(tenant, path)
    sampler = rows.sampler_id(session, seq)
    row = tx.row("SELECT path, model FROM samplers WHERE sampler = ?", sampler)
    if row is not None and row != (path, None):
        reason = "another sampling session came with this number before"
        raise RequestError("sampling_session_seq_id", reason, "use a new number for every session")
    if row is None:
        if tx.count("samplers WHERE tenant = ?", tenant) >= MAX_SAMPLERS:
            reason = f"{MAX_SAMPLERS} sampling sessions are open"
            raise RequestError("sampling_session_seq_id", reason, "open another session, and end this one")
        names = {"sampler": sampler, "tenant": tenant, "session": session}
        SAMPLERS.insert(tx.db, rows.SamplingSession(**names, path=path, model=None, created_s=tx.now_s))
    return sampler


def served(
    tx: Transaction, tenant: str, sampler_id: str, missing: str | None
) -> str | Pending | rows.SavedState | RequestError:
    """As `RequestQueue.serve`; the state if that needs an adapter of its own, the error of one that leaves."""
    sampler = tx.sampler(tenant, sampler_id)
    if sampler.model is not None:
        model = tx.model(tenant, sampler.model)
        if model.published is None:
            return Pending(reason="no server has the model yet")
        return model.adapter
    if sampler.path is None:
        return ""
    state = tx.state(tenant, sampler.path)
    for snapshot in tx.models("of_state = ? AND removed = 0", state.path):
        if snapshot.model != rows.snapshot_id(snapshot.name, state.label):
            leave(tx, snapshot, "other weights were saved under its name")
    owner = tx.of_adapter(state.adapter)
    if owner is not None and not owner.removed and state.version is not None and owner.published == state.version:
        if (name := f"{owner.adapter}@v{state.version}") != missing:
            return name
        tx.do("UPDATE saved_states SET version = NULL WHERE adapter = ? AND label = ?", state.adapter, state.label)
    for snapshot in tx.models("of_state = ? AND removed = 0", state.path):
        if snapshot.broken:
            leave(tx, snapshot, snapshot.broken)
            return RequestError("sampling_session_id", snapshot.broken, "save the weights again")
        name = f"{snapshot.adapter}@v{snapshot.published}"
        if snapshot.published is not None and name != missing:
            return name
        return Pending(reason="the weights are loaded again", capacity=True)
    return state


def expire(tx: Transaction, state: rows.SavedState) -> None:
    """Forget the state, the model that serves it and the sampling sessions that only it keeps."""
    forget(tx, state)
    for snapshot in tx.models("of_state = ? AND removed = 0", state.path):
        leave(tx, snapshot, "its weights were deleted")
    tx.do("DELETE FROM samplers WHERE path = ?", state.path)


def set_ttl(tx: Transaction, tenant: str, path: str, ttl_s: float | None) -> None:
    """The state stays for ``ttl_s`` seconds from now; None: for ever."""
    check_ttl(ttl_s)
    state, until = tx.state(tenant, path), None if ttl_s is None else tx.now_s + ttl_s
    tx.do("UPDATE saved_states SET expires_s = ? WHERE adapter = ? AND label = ?", until, state.adapter, state.label)


def saved(tx: Transaction, tenant: str, model: str | None = None) -> list[rows.SavedState]:
    """The tenant's named states, oldest first; with ``model`` of this one, which may have left."""
    where = "tenant = ? AND named = 1 AND (expires_s IS NULL OR expires_s > ?) AND model = COALESCE(?, model)"
    return tx.states(where, tenant, tx.now_s, model)


# Samples that were acknowledged and that no client has fetched are kept over restarts of the service; their outcomes
# are not. After a restart they are sampled again, which no client can see: with a seed the outcome is the same, and
# without one it is as good as the one that no client received.


def keep_sample(tx: Transaction, tenant: str, sampler: str, sample: str, mark: str, body: bytes) -> None:
    """Take a sample of the tenant's sampling session, or find it taken. Raises RequestError."""
    tx.sampler(tenant, sampler)
    row = tx.row("SELECT fingerprint FROM samples WHERE sample = ?", sample)
    if row is None:
        names = {"sample": sample, "tenant": tenant, "sampler": sampler, "fingerprint": mark}
        SAMPLES.insert(tx.db, rows.PendingSample(**names, body=body, at_s=tx.now_s))
    elif row[0] != mark:
        raise RequestError("seq_id", "another request came under this number", "use a new number")


def kept_samples(tx: Transaction) -> list[rows.PendingSample]:
    """Oldest first."""
    return SAMPLES.select(tx.db, "1")


def drop_samples(tx: Transaction, samples: Iterable[str]) -> None:
    """Forget samples that are no longer needed, and those that were not fetched for a day."""
    for sample in samples:
        tx.do("DELETE FROM samples WHERE sample = ?", sample)
    tx.do("DELETE FROM samples WHERE at_s < ?", tx.now_s - UNFETCHED_S)


WANTED = {
    rows.Verb.PAUSE: DesiredPhase.PAUSED,
    rows.Verb.RESUME: DesiredPhase.ACTIVE,
    rows.Verb.DELETE: DesiredPhase.DELETED,
}
OVER = (AdapterPhase.DONE, AdapterPhase.FAILED)
CARRIED_OUT = {
    DesiredPhase.ACTIVE: (AdapterPhase.ACTIVE, AdapterPhase.DRAINING, *OVER),
    DesiredPhase.PAUSED: (AdapterPhase.PAUSED, *OVER),
}

Phases = Mapping[str, AdapterPhase]
"""The phase of each adapter of the run by its key there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequest:
    """A valid adapter that a tenant requests."""

    name: str
    rank: int
    weight: float
    settings: dict[str, Any]


def check_name(name: str) -> None:
    if not rows.NAME.fullmatch(name):
        reason = f"{name[:64]!r} is no name"
        raise RequestError("name", reason, "use up to 47 of a-z, 0-9, _ and -, the first a letter or a digit")


def create(tables: rows.Tables, tenant: str, request: AdapterRequest, *, now_s: float) -> rows.AdapterRow:
    """The row of a new adapter. Where the servers have no place for it, the run lets it wait for one."""
    check_name(request.name)
    quota, mine = tables.quotas[tenant], tables.of(tenant)
    if (tenant, request.name) in tables.adapters:
        raise RequestError("name", f"there is an adapter {request.name!r}", "choose another name, or delete it first")
    for key, found, most in (("rank", request.rank, quota.rank), ("weight", request.weight, quota.weight)):
        if found > most:
            raise RequestError(key, f"{found:g} is above the quota of {most:g}", f"use at most {most:g}")
    if len(mine) >= quota.adapters:
        raise RequestError("name", f"the quota is {quota.adapters} adapters", "delete one first", status=429)
    _check_queue(tables, tenant)
    return rows.AdapterRow(
        tenant=tenant,
        name=request.name,
        incarnation=tables.deleted.get(tenant, 0) + 1,
        wanted=DesiredPhase.ACTIVE,
        settings=request.settings,
        created_s=now_s,
    )


def changed(tables: rows.Tables, phases: Phases, tenant: str, name: str, verb: rows.Verb) -> rows.AdapterRow:
    """The row of an adapter that is to pause, to resume or to leave."""
    row = tables.adapters.get((tenant, name))
    if row is None:
        raise unknown_adapter(name)
    if verb is not rows.Verb.DELETE:
        _check_queue(tables, tenant)  # what takes work away is always taken
        if (phase := phases.get(row.key)) in OVER:
            raise RequestError("name", f"{name!r} is {phase}: it takes no further steps", "create another adapter")
    return replace(row, wanted=WANTED[verb], open=row.open + 1)


def _check_queue(tables: rows.Tables, tenant: str) -> None:
    limit = tables.quotas[tenant].operations
    if sum(row.open for row in tables.of(tenant)) >= limit:
        reason = f"{limit} operations wait for the run, and that is the quota"
        raise RequestError("operations", reason, "wait until the run has carried some out", status=429)


def carried_out(tables: rows.Tables, phases: Phases) -> list[rows.AdapterRow]:
    """Adapters with open operations that the run has carried out: they are what the newest of these wants."""
    return [row for row in tables.adapters.values() if row.open and phases.get(row.key) in CARRIED_OUT[row.wanted]]


def answered(tx: Transaction, tenant: str, request: str, fingerprint: str) -> bytes | None:
    """The answer that the tenant's idempotency key had; None without. Raises RequestError for another request."""
    found = tx.row("SELECT fingerprint, answer FROM answers WHERE tenant = ? AND request = ?", tenant, request)
    if found is not None and found[0] != fingerprint:
        reason = "this key came with another request before"
        raise RequestError("Idempotency-Key", reason, "use a new key for every operation")
    return None if found is None else found[1]


def operate(
    tx: Transaction,
    tenant: str,
    verb: rows.Verb,
    decide: Callable[[rows.Tables], rows.AdapterRow],
    request: str,
    fingerprint: str,
) -> bytes:
    """The answer to a tenant's operation, which makes an adapter what ``decide`` returns. Raises RequestError.

    ``request`` is the idempotency key, or empty; the same key with another ``fingerprint`` is refused.
    """
    if request and (found := answered(tx, tenant, request, fingerprint)) is not None:
        return found
    row = decide(tx.tables)
    # The run carries it out as soon as it can; GET shows when.
    body = {"name": row.name, "incarnation": row.incarnation, "verb": verb, "wanted": row.wanted}
    answer = msgspec.json.encode(body)
    reached("service.decided")
    tx.record(row)
    if request:
        tx.insert("answers", tenant=tenant, request=request, fingerprint=fingerprint, answer=answer)
        old = "SELECT rowid FROM answers WHERE tenant = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?"
        tx.do(f"DELETE FROM answers WHERE rowid IN ({old})", tenant, MAX_ANSWERS)
    return answer


def unknown_adapter(name: str) -> RequestError:
    """Also for the adapters of others: that they exist is not shown."""
    return RequestError("name", f"there is no adapter {name!r}", "list the adapters with GET /v1/adapters", status=404)

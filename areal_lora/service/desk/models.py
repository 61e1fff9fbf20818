"""Sessions and models: made, silent, gone; and the adapters that serve snapshots."""

from __future__ import annotations

import secrets

import msgspec

from areal_lora.operations.messages import LoadState, Publish
from areal_lora.service.desk.answers import forget, give
from areal_lora.service.desk.asks import CreateModel, Lora, Pending, Serve, Unloaded, encode
from areal_lora.service.desk.books import Books, unknown
from areal_lora.service.desk.numbers import append, fail_open, load
from areal_lora.service.desk.requests import insert
from areal_lora.service.desk.rows import Model, Sampler, Saved, model_id, sampler_id
from areal_lora.service.refused import Refused
from areal_lora.service.rows import AdapterRow

MOST_SESSIONS, MOST_SAMPLERS = 256, 4096
"""Of a tenant, at a time."""


def open_session(books: Books, tenant: str, about: bytes) -> str:
    row = books.row("SELECT COUNT(*) FROM sessions WHERE tenant = ? AND ended = 0", tenant)
    if row is not None and row[0] >= MOST_SESSIONS:
        raise Refused(429, "session_id", f"{MOST_SESSIONS} sessions are open", "end some, or wait until they end")
    session = f"s{secrets.token_hex(6)}"
    books.insert("sessions", session=session, tenant=tenant, about=about, created_s=books.now_s)
    return session


def end_session(books: Books, session: str) -> None:
    """Its models leave; what they saved stays."""
    books.do("UPDATE sessions SET ended = 1 WHERE session = ?", session)
    books.ended.add(session)
    for model in books.models("session = ? AND gone = 0", session):
        leave(books, model, "its session has ended")
    books.do("DELETE FROM samples WHERE sampler IN (SELECT sampler FROM samplers WHERE session = ?)", session)
    books.do("DELETE FROM samplers WHERE session = ?", session)


def sessions_with_models(books: Books) -> dict[str, str]:
    """Open sessions that have models, with their tenants."""
    return dict(books.rows("SELECT DISTINCT session, tenant FROM models WHERE gone = 0 AND of_state IS NULL"))


def leave(books: Books, model: Model, reason: str) -> None:
    """The model is gone; its adapter is to leave."""
    books.do("UPDATE models SET gone = 1 WHERE model = ?", model.model)
    fail_open(books, model, reason)
    books.do("DELETE FROM client_operations WHERE adapter = ?", model.adapter)
    books.do("UPDATE requests SET ask = NULL WHERE owner = ?", model.model)


def unload(books: Books, tenant: str, model_id: str) -> str:
    """The model leaves, what it saved stays; returns the request, which is answered at once."""
    request = f"{model_id}:unload"
    if books.row("SELECT 1 FROM requests WHERE request = ? AND tenant = ?", request, tenant) is None:
        leave(books, books.model(tenant, model_id), "the model was unloaded")
        insert(books, tenant, request, model_id, 0, "", b"", held=False)
        give(books, request, Unloaded(model=model_id))
    return request


def evict(books: Books, model: str) -> None:
    for each in books.models("model = ? AND gone = 0", model):
        leave(books, each, "its place is needed")


def snapshot_name() -> str:
    """Name of an adapter that serves a saved state."""
    return f"snapshot-{secrets.token_hex(6)}"


def name_of(session: str, model_seq: int) -> str:
    """Name of a model's adapter among those of its tenant."""
    return f"{session}-{model_seq}"


def insert_model(
    books: Books,
    row: AdapterRow,
    session: str,
    model_seq: int,
    request: str,
    fingerprint: str,
    ask: CreateModel,
    lora: Lora,
) -> None:
    """The model whose adapter is ``row``, and the request that made it."""
    model = model_id(session, model_seq)
    _insert(books, row, model, session, lora, None, ask.notes)
    insert(books, row.tenant, request, model, 0, fingerprint, encode(ask), held=False)
    if ask.load is not None:
        append(books, row.key, request, load(books, row.tenant, ask.load))


def insert_snapshot(books: Books, row: AdapterRow, state: Saved) -> None:
    """The model that serves ``state``."""
    _insert(books, row, f"{row.name}:snapshot", "", state.lora, state.path, {})
    append(books, row.key, "", LoadState(adapter=state.adapter, label=state.label, optimizer=False))
    append(books, row.key, "", Publish())


def open_sampler(books: Books, tenant: str, session: str, seq: int, path: str | None) -> str:
    books.session(tenant, session)
    if not 0 <= seq < 1 << 53:
        raise Refused(422, "sampling_session_seq_id", f"{seq} is no number of a sampling session", "count from 0")
    if path is not None:
        books.state(tenant, path)
    sampler = sampler_id(session, seq)
    row = books.row("SELECT path, model FROM samplers WHERE sampler = ?", sampler)
    if row is not None and row != (path, None):
        reason = "another sampling session came with this number before"
        raise Refused(422, "sampling_session_seq_id", reason, "use a new number for every session")
    if row is None:
        count = books.row("SELECT COUNT(*) FROM samplers WHERE tenant = ?", tenant)
        if count is not None and count[0] >= MOST_SAMPLERS:
            reason = f"{MOST_SAMPLERS} sampling sessions are open"
            raise Refused(422, "sampling_session_seq_id", reason, "open another session, and end this one")
        insert_sampler(
            books,
            Sampler(sampler=sampler, tenant=tenant, session=session, path=path, model=None, created_s=books.now_s),
        )
    return sampler


def insert_sampler(books: Books, sampler: Sampler) -> None:
    books.insert(
        "samplers",
        sampler=sampler.sampler,
        tenant=sampler.tenant,
        session=sampler.session,
        path=sampler.path,
        model=sampler.model,
        created_s=sampler.created_s,
    )


def served(books: Books, tenant: str, sampler_id: str, missing: str | None) -> Serve | Pending | Saved:
    """Under which name servers have what the sampling session samples; the state if that needs an adapter of its own.

    ``missing``: no server has this name any more.
    """
    sampler = books.sampler(tenant, sampler_id)
    if sampler.model is not None:
        return _newest(books, sampler.model)
    if sampler.path is None:
        return Serve(model=None)
    state = books.state(tenant, sampler.path)
    owner = books.of_adapter(state.adapter)
    if owner is not None and not owner.gone and state.version is not None and owner.published == state.version:
        if (name := f"{owner.adapter}@v{state.version}") != missing:
            return Serve(model=name)
        books.do("UPDATE saved_states SET version = NULL WHERE adapter = ? AND label = ?", state.adapter, state.label)
    for snapshot in books.models("of_state = ? AND gone = 0", state.path):
        if snapshot.broken:
            leave(books, snapshot, snapshot.broken)
            raise Refused(422, "sampling_session_id", snapshot.broken, "save the weights again")
        name = f"{snapshot.adapter}@v{snapshot.published}"
        if snapshot.published is not None and name != missing:
            return Serve(model=name)
        return Pending(reason="the weights are loaded again", capacity=True)
    return state


def expire(books: Books, state: Saved) -> None:
    """Forget the state, the model that serves it and the sampling sessions that only it keeps."""
    forget(books, state)
    for snapshot in books.models("of_state = ? AND gone = 0", state.path):
        leave(books, snapshot, "its weights were deleted")
    books.do("DELETE FROM samplers WHERE path = ?", state.path)


def _newest(books: Books, model_id: str) -> Serve | Pending:
    found = books.models("model = ? AND gone = 0", model_id)
    if not found:
        raise unknown("model_id", "model", model_id)
    if found[0].published is None:
        return Pending(reason="no server has the model yet")
    return Serve(model=found[0].adapter)


def _insert(
    books: Books, row: AdapterRow, model: str, session: str, lora: Lora, of_state: str | None, notes: dict[str, str]
) -> None:
    books.insert(
        "models",
        model=model,
        tenant=row.tenant,
        session=session,
        name=row.name,
        incarnation=row.incarnation,
        adapter=row.key,
        lora=encode(lora),
        created_s=row.created_s,
        of_state=of_state,
        notes=msgspec.json.encode(notes).decode(),
    )

"""From the outcomes of a request's operations to its answer, with what it leaves: saved states, sampling sessions."""

from __future__ import annotations

from typing import cast

import msgspec

from areal_lora.operations.messages import Failed, Kept, Outcome, Published, Scored, Stepped, decode_outcome
from areal_lora.service.desk.asks import (
    Answer,
    Ask,
    Created,
    CreateModel,
    Load,
    Loaded,
    Opened,
    Save,
    SaveForSampler,
    Stored,
    Train,
    decode_ask,
    encode,
)
from areal_lora.service.desk.books import Books
from areal_lora.service.desk.rows import Kind, Model, Saved, path_of, sampler_id


def give(books: Books, request: str, answer: Answer) -> None:
    """Keep the first answer of a request. What it asked for is kept while the trainer may have to hear it again."""
    books.do(
        "UPDATE requests SET answer = ?, answered_s = ?, held = 0,"
        " ask = CASE WHEN EXISTS (SELECT 1 FROM client_operations o WHERE o.request = requests.request) THEN ask END"
        " WHERE request = ? AND answer IS NULL",
        encode(answer),
        books.now_s,
        request,
    )
    books.answered.add(request)


def settle(books: Books, model: Model, request: str, newest: Outcome | None) -> None:
    """Answer ``request`` if all its operations have ended; ``newest`` is the outcome of the last of them."""
    ops = books.rows(
        "SELECT number, fate, outcome FROM client_operations WHERE adapter = ? AND request = ? ORDER BY number",
        model.adapter,
        request,
    )
    row = books.row("SELECT ask FROM requests WHERE request = ? AND answer IS NULL", request)
    if row is None or any(fate is None for _, fate, _ in ops):
        return
    outcomes = [cast(Outcome, newest) if outcome is None else decode_outcome(outcome) for _, _, outcome in ops]
    ask = decode_ask(row[0])
    if (failed := next((each for each in outcomes if isinstance(each, Failed)), None)) is not None:
        if kept := [number for number, _, outcome in ops if outcome and isinstance(decode_outcome(outcome), Kept)]:
            _leave(books, model, ask, kept)
        give(books, request, failed)
        return
    give(books, request, _answer(books, model, ask, [number for number, _, _ in ops], outcomes))


def forget(books: Books, state: Saved) -> None:
    """Forget a saved state. Its files are removed by whoever reads ``dropped_states``."""
    books.do("DELETE FROM saved_states WHERE model = ? AND kind = ? AND name = ?", state.model, state.kind, state.name)
    drop_label(books, state.adapter, state.label)
    books.forgotten.add(state.path)


def drop_label(books: Books, adapter: str, label: str) -> None:
    books.do("INSERT OR IGNORE INTO dropped_states VALUES (?, ?)", adapter, label)


def _leave(books: Books, model: Model, ask: Ask, kept: list[int]) -> None:
    """A state that was saved for a request that then failed belongs to no one."""
    if isinstance(ask, Save | SaveForSampler):
        for number in kept:
            drop_label(books, model.adapter, f"n{number}")


def _answer(books: Books, model: Model, ask: Ask, numbers: list[int], outcomes: list[Outcome]) -> Answer:
    match ask:
        case CreateModel(load=load):
            return Created(model=model.model, path=load.path if load else None)
        case Train():
            return cast(Scored | Stepped, outcomes[0])
        case Load(path=path):
            return Loaded(model=model.model, path=path)
        case Save(name=name, ttl_s=ttl_s, notes=notes):
            return Stored(path=_save(books, model, Kind.WEIGHTS, name, numbers[0], outcomes[0], None, ttl_s, notes))
        case SaveForSampler(name=str(name), ttl_s=ttl_s, notes=notes):
            version = cast(Published, outcomes[-1]).version
            path = _save(books, model, Kind.SAMPLER, name, numbers[0], outcomes[0], version, ttl_s, notes)
            return Stored(path=path)
        case SaveForSampler(sampler_seq=int(seq), in_flight=in_flight, ttl_s=ttl_s, notes=notes):
            sampler, path = sampler_id(model.session, seq), ""
            if not in_flight:
                version = cast(Published, outcomes[-1]).version
                name = unnamed(numbers[0])
                path = _save(books, model, Kind.SAMPLER, name, numbers[0], outcomes[0], version, ttl_s, notes)
            books.do(
                "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?)",
                sampler,
                model.tenant,
                model.session,
                path or None,
                model.model if in_flight else None,
                books.now_s,
            )
            return Opened(sampler=sampler)
    raise AssertionError(f"{type(ask).__name__} is answered elsewhere")


def unnamed(number: int) -> str:
    """Name of a state that a sampling session keeps; clients' names do not begin like it."""
    return f".{number}"


def _save(
    books: Books,
    model: Model,
    kind: Kind,
    name: str,
    number: int,
    kept: Outcome,
    version: int | None,
    ttl_s: float | None,
    notes: dict[str, str],
) -> str:
    """Note the saved state; one of this name that was there before is dropped."""
    assert isinstance(kept, Kept)
    for before in books.states("model = ? AND kind = ? AND name = ?", model.model, kind, name):
        forget(books, before)
    books.insert(
        "saved_states",
        model=model.model,
        tenant=model.tenant,
        adapter=model.adapter,
        kind=kind,
        name=name,
        label=f"n{number}",
        named=not name.startswith("."),
        version=version,
        step=kept.step,
        n_bytes=kept.n_bytes,
        lora=encode(model.lora),
        created_s=books.now_s,
        expires_s=None if ttl_s is None else books.now_s + ttl_s,
        notes=msgspec.json.encode(notes).decode(),
    )
    return path_of(model.model, kind, name)

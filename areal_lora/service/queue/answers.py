"""From the outcomes of a request's operations to its answer, with what it leaves: saved states, sampling sessions."""

from __future__ import annotations

from typing import cast

from areal_lora.operations.protocol import (
    OperationFailure,
    Outcome,
    PassResult,
    PublishResult,
    StateResult,
    StepResult,
    decode_outcome,
)
from areal_lora.service.queue.queue_rows import Kind, Model, SamplingSession, SavedState, sampler_id
from areal_lora.service.queue.queue_store import SAMPLERS, STATES, Transaction
from areal_lora.service.queue.requests import (
    Action,
    Answer,
    CreatedModel,
    CreateModel,
    Load,
    LoadedModel,
    OpenedSampler,
    Save,
    SaveForSampler,
    StoredState,
    Train,
    decode_action,
    encode,
)


def give(tx: Transaction, request: str, answer: Answer) -> None:
    """Keep the first answer of a request. Its action is kept while the trainer may still expect it."""
    tx.do(
        "UPDATE requests SET answer = ?, answered_s = ?, held = 0,"
        " action = CASE WHEN EXISTS (SELECT 1 FROM client_operations o WHERE o.request = requests.request)"
        " THEN action END"
        " WHERE request = ? AND answer IS NULL",
        encode(answer),
        tx.now_s,
        request,
    )
    tx.answered.add(request)


def settle(tx: Transaction, model: Model, request: str, newest: Outcome | None) -> None:
    """Answer ``request`` if all its operations have ended; ``newest`` is the outcome of the last of them."""
    ops = tx.rows(
        "SELECT number, fate, outcome FROM client_operations WHERE adapter = ? AND request = ? ORDER BY number",
        model.adapter,
        request,
    )
    row = tx.row("SELECT action FROM requests WHERE request = ? AND answer IS NULL", request)
    if row is None or any(fate is None for _, fate, _ in ops):
        return
    outcomes = [cast(Outcome, newest) if outcome is None else decode_outcome(outcome) for _, _, outcome in ops]
    action = decode_action(row[0])
    if (failed := next((each for each in outcomes if isinstance(each, OperationFailure)), None)) is not None:
        if kept := [
            number for number, _, outcome in ops if outcome and isinstance(decode_outcome(outcome), StateResult)
        ]:
            _leave(tx, model, action, kept)
        give(tx, request, failed)
        return
    give(tx, request, _answer(tx, model, action, [number for number, _, _ in ops], outcomes))


def forget(tx: Transaction, state: SavedState) -> None:
    """Forget a saved state. Its files are removed by whoever reads ``dropped_states``."""
    tx.do("DELETE FROM saved_states WHERE model = ? AND kind = ? AND name = ?", state.model, state.kind, state.name)
    drop_label(tx, state.adapter, state.label)
    tx.forgotten.add(state.path)


def drop_label(tx: Transaction, adapter: str, label: str) -> None:
    tx.do("INSERT OR IGNORE INTO dropped_states VALUES (?, ?)", adapter, label)


def _leave(tx: Transaction, model: Model, action: Action, kept: list[int]) -> None:
    """A state that was saved for a request that then failed belongs to no one."""
    if isinstance(action, Save | SaveForSampler):
        for number in kept:
            drop_label(tx, model.adapter, f"n{number}")


def _answer(tx: Transaction, model: Model, action: Action, numbers: list[int], outcomes: list[Outcome]) -> Answer:
    match action:
        case CreateModel(load=load):
            return CreatedModel(model=model.model, path=load.path if load else None)
        case Train():
            return cast(PassResult | StepResult, outcomes[0])
        case Load(path=path):
            return LoadedModel(model=model.model, path=path)
        case Save(name=name, ttl_s=ttl_s, notes=notes):
            return StoredState(path=_save(tx, model, Kind.WEIGHTS, name, numbers[0], outcomes[0], None, ttl_s, notes))
        case SaveForSampler(name=str(name), ttl_s=ttl_s, notes=notes):
            version = cast(PublishResult, outcomes[-1]).version
            path = _save(tx, model, Kind.SAMPLER, name, numbers[0], outcomes[0], version, ttl_s, notes)
            return StoredState(path=path)
        case SaveForSampler(sampler_seq=int(seq), in_flight=in_flight, ttl_s=ttl_s, notes=notes):
            sampler, path = sampler_id(model.session, seq), ""
            if not in_flight:
                version = cast(PublishResult, outcomes[-1]).version
                name = unnamed(numbers[0])
                path = _save(tx, model, Kind.SAMPLER, name, numbers[0], outcomes[0], version, ttl_s, notes)
            made = SamplingSession(
                sampler=sampler,
                tenant=model.tenant,
                session=model.session,
                path=path or None,
                model=model.model if in_flight else None,
                created_s=tx.now_s,
            )
            SAMPLERS.insert(tx.db, made, "ON CONFLICT DO NOTHING")
            return OpenedSampler(sampler=sampler)
    raise AssertionError(f"{type(action).__name__} is answered elsewhere")


def unnamed(number: int) -> str:
    """Name of a state that a sampling session keeps; clients' names do not start like it."""
    return f".{number}"


def _save(
    tx: Transaction,
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
    assert isinstance(kept, StateResult)
    for before in tx.states("model = ? AND kind = ? AND name = ?", model.model, kind, name):
        forget(tx, before)
    state = SavedState(
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
        lora=model.lora,
        created_s=tx.now_s,
        expires_s=None if ttl_s is None else tx.now_s + ttl_s,
        notes=notes,
    )
    STATES.insert(tx.db, state)
    return state.path

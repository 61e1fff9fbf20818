"""From the outcomes of a request's operations to its answer, with what it leaves: saved states, sampling sessions."""

from typing import cast

from areal_lora.operations import protocol
from areal_lora.service.queue import requests
from areal_lora.service.queue.queue_rows import Kind, Model, SamplingSession, SavedState, sampler_id
from areal_lora.service.queue.queue_store import SAMPLERS, STATES, Transaction


def give(tx: Transaction, request: str, answer: requests.Answer) -> None:
    """Keep the first answer of a request. Its action is kept while the trainer may still expect it: what fails is sent
    again without data.
    """
    needed = "EXISTS (SELECT 1 FROM client_operations o WHERE o.request = requests.request AND o.failed = 0)"
    given = f"answer = ?, answered_s = ?, held = 0, action = CASE WHEN {needed} THEN action END"
    sql = f"UPDATE requests SET {given} WHERE request = ? AND answer IS NULL"
    tx.do(sql, requests.encode(answer), tx.now_s, request)
    tx.answered.add(request)


def settle(tx: Transaction, model: Model, request: str, newest: protocol.Outcome | None) -> None:
    """Answer ``request`` if all its operations have ended; ``newest`` is the outcome of the last of them."""
    sql = "SELECT number, failed, outcome FROM client_operations WHERE adapter = ? AND request = ? ORDER BY number"
    ops = tx.rows(sql, model.adapter, request)
    row = tx.row("SELECT action FROM requests WHERE request = ? AND answer IS NULL", request)
    if row is None or any(failed is None for _, failed, _ in ops):
        return
    known = [newest if outcome is None else protocol.decode_outcome(outcome) for _, _, outcome in ops]
    outcomes, numbers = [outcome for outcome in known if outcome is not None], [number for number, _, _ in ops]
    action = requests.decode_action(row[0])
    failed = next((each for each in outcomes if isinstance(each, protocol.OperationFailure)), None)
    if failed is None:
        give(tx, request, _answer(tx, model, action, numbers, outcomes))
        return
    if isinstance(action, requests.Save | requests.SaveForSampler):
        for number, outcome in zip(numbers, outcomes):
            if isinstance(outcome, protocol.StateResult):  # it belongs to no one
                drop_label(tx, model.adapter, f"n{number}")
    give(tx, request, failed)


def forget(tx: Transaction, state: SavedState) -> None:
    """Forget a saved state. Its files are removed by whoever reads ``dropped_states``."""
    tx.do("DELETE FROM saved_states WHERE model = ? AND kind = ? AND name = ?", state.model, state.kind, state.name)
    drop_label(tx, state.adapter, state.label)
    tx.forgotten.add(state.path)


def drop_label(tx: Transaction, adapter: str, label: str) -> None:
    tx.do("INSERT OR IGNORE INTO dropped_states VALUES (?, ?)", adapter, label)


def _answer(
    tx: Transaction, model: Model, action: requests.Action, numbers: list[int], outcomes: list[protocol.Outcome]
) -> requests.Answer:
    match action:
        case requests.CreateModel(load=load):
            return requests.ActionResult(model=model.model, path=load.path if load else None)
        case requests.Train():
            return cast(protocol.PassResult | protocol.StepResult, outcomes[0])
        case requests.Load(path=path):
            return requests.ActionResult(model=model.model, path=path)
        case requests.Save(name=name):
            return requests.ActionResult(path=_save(tx, model, Kind.WEIGHTS, name, action, numbers[0], outcomes))
        case requests.SaveForSampler(name=str(name)):
            return requests.ActionResult(path=_save(tx, model, Kind.SAMPLER, name, action, numbers[0], outcomes))
        case requests.SaveForSampler(sampler_seq=int(seq), in_flight=in_flight):
            name = f".{numbers[0]}"  # clients' names do not start like it
            made = SamplingSession(
                sampler=sampler_id(model.session, seq),
                tenant=model.tenant,
                session=model.session,
                path=None if in_flight else _save(tx, model, Kind.SAMPLER, name, action, numbers[0], outcomes),
                model=model.model if in_flight else None,
                created_s=tx.now_s,
            )
            SAMPLERS.insert(tx.db, made, "ON CONFLICT DO NOTHING")
            return requests.ActionResult(sampler=made.sampler)
    raise AssertionError(f"{type(action).__name__} is answered elsewhere")


def _save(
    tx: Transaction,
    model: Model,
    kind: Kind,
    name: str,
    action: requests.Save | requests.SaveForSampler,
    number: int,
    outcomes: list[protocol.Outcome],
) -> str:
    """Note the saved state; one of this name that was there before is dropped."""
    kept, published = outcomes[0], outcomes[-1]
    assert isinstance(kept, protocol.StateResult)
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
        version=published.version if isinstance(published, protocol.PublishResult) else None,
        step=kept.step,
        n_bytes=kept.n_bytes,
        lora=model.lora,
        created_s=tx.now_s,
        expires_s=None if action.ttl_s is None else tx.now_s + action.ttl_s,
        notes=action.notes,
    )
    STATES.insert(tx.db, state)
    return state.path

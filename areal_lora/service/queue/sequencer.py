"""Operations of models: their numbers, without gaps, and from outcomes the answer, saved states, sampling sessions."""

from collections.abc import Callable
from typing import cast

import msgspec

from areal_lora.errors import RequestError
from areal_lora.operations import protocol
from areal_lora.processes.log import get_logger
from areal_lora.service.queue import ordering, requests
from areal_lora.service.queue.queue_rows import STATE_NAME, Kind, Model, SamplingSession, SavedState, sampler_id
from areal_lora.service.queue.queue_store import SAMPLERS, STATES, Transaction, unknown

LOST = protocol.OperationFailure(reason="a restart of the trainer has lost what came of it", by_client=False)
KEPT_FAILED = 512
MAX_TTL_S = 10 * 366 * 86400.0
AT_ONCE_BYTES = 32 << 20
_what: Callable[[bytes], protocol.What] = msgspec.msgpack.Decoder(protocol.What).decode

log = get_logger(__name__)


def promote(tx: Transaction, model: Model) -> None:
    """Give numbers to the requests of ``model`` whose turn has come."""
    waiting = "SELECT seq, at_s FROM requests WHERE owner = ? AND seq >= ? AND answer IS NULL"
    held = dict(tx.rows(waiting, model.model, model.next_seq))
    start = model.next_seq
    if (after_gap := ordering.sealed(start, held, tx.now_s)) is not None:
        missing = f"request {start}" if after_gap == start + 1 else f"requests {start} to {after_gap - 1}"
        append(tx, model.adapter, "", protocol.Poison(reason=f"{missing} of its window never came"))
        start = after_gap
    for seq in ordering.ready(start, held):
        sql = "SELECT request, action FROM requests WHERE owner = ? AND seq = ?"
        [(request, action)] = tx.rows(sql, model.model, seq)
        match requests.decode_action(action):
            case requests.Refuse(reason=reason):
                give(tx, request, protocol.OperationFailure(reason=reason, by_client=True))
            case decoded:
                for what in _operations(tx, model, decoded):
                    append(tx, model.adapter, request, what)
        start = seq + 1
    tx.do("UPDATE models SET next_seq = ? WHERE model = ?", start, model.model)


def append(tx: Transaction, adapter: str, request: str, what: protocol.What) -> int:
    """Give ``what`` the adapter's next number. The body of a pass is that of its request."""
    sql = "UPDATE models SET next_number = next_number + 1 WHERE adapter = ? RETURNING next_number - 1"
    ((number,),) = tx.rows(sql, adapter)
    if isinstance(what, protocol.SaveState):
        what = protocol.SaveState(label=f"n{number}", moments=what.moments)
    body, kind = None if isinstance(what, protocol.Pass) else requests.encode(what), ordering.kind_of(what)
    tx.insert("client_operations", adapter=adapter, number=number, request=request, what=body, kind=kind)
    tx.moved.add(adapter)
    return int(number)


def load(tx: Transaction, tenant: str, action: requests.Load) -> protocol.LoadState:
    """Raises RequestError where nothing is saved at the path, or not the moments that it is to have."""
    state = tx.state(tenant, action.path)
    if action.optimizer and not state.named:
        raise RequestError("path", "a sampling session's state has no optimizer", "load its weights, or save by name")
    return protocol.LoadState(adapter=state.adapter, label=state.label, optimizer=action.optimizer)


def to_send(tx: Transaction, adapter: str, start: int) -> list[protocol.Operation]:
    """The operations from number ``start`` on that are due, as the trainer is to carry them out."""
    model = tx.of_adapter(adapter)
    if model is None or model.removed or model.broken:
        return []
    kinds = tx.rows("SELECT number, kind, failed FROM client_operations WHERE adapter = ? ORDER BY number", adapter)
    ops = [ordering.Op(number, ordering.OpKind(kind), failed) for number, kind, failed in kinds]
    first = next((op.number for op in ops if op.failed is None), model.next_number)
    found = tx.db.execute(
        "SELECT o.number, o.what, r.action FROM client_operations o LEFT JOIN requests r ON r.request = o.request"
        " WHERE o.adapter = ? AND o.number >= ? AND o.number < ? ORDER BY o.number LIMIT ?",
        (adapter, start, first + ordering.AHEAD, ordering.AHEAD),  # a restarted trainer repeats what has outcomes
    )
    chosen, n_bytes = list[protocol.Operation](), 0
    for number, what, action in found:
        n_bytes += len(action or b"")
        if chosen and n_bytes > AT_ONCE_BYTES:
            break
        sent = _as_sent(what, action, ordering.spoiled(ops, number))
        chosen.append(protocol.Operation(adapter=adapter, number=number, what=sent))
    return chosen


def expected(tx: Transaction, adapter: str, number: int) -> bool:
    """The trainer has the adapter, and expects ``number``. False if the queue cannot send that.

    A trainer that starts before what was durable has lost steps, so its clients must not go further.
    """
    model = tx.of_adapter(adapter)
    if model is None or model.removed or model.broken:
        return False
    if not model.closed < number <= model.next_number:
        reason = (
            f"the trainer's newest checkpoint expects operation {number}, but those from {model.closed + 1} to"
            f" {model.next_number} can be sent: its checkpoints or the service's file were replaced by older ones"
        )
        log.error("%s: %s", adapter, reason)
        tx.do("UPDATE models SET broken = ? WHERE adapter = ?", reason, adapter)
        fail_open(tx, model, reason)
        return False
    if not model.joined:
        tx.do("UPDATE models SET joined = 1 WHERE adapter = ?", adapter)
        settle(tx, model, f"{model.model}:create", None)
    return True


def completed(tx: Transaction, adapter: str, number: int, outcome: protocol.Outcome) -> None:
    """Keep the first outcome of an operation."""
    if (model := tx.of_adapter(adapter)) is not None:
        _record(tx, model, number, outcome)


def durable(tx: Transaction, adapter: str, number: int) -> None:
    """A checkpoint has the operations up to ``number``: cut the log there. Those without an outcome are lost."""
    if (model := tx.of_adapter(adapter)) is None:
        return
    lost = "SELECT number FROM client_operations WHERE adapter = ? AND number <= ? AND failed IS NULL"
    for (earlier,) in tx.rows(lost, adapter, number):
        _record(tx, model, earlier, LOST)
    _cut(tx, model, number)


def fail_open(tx: Transaction, model: Model, reason: str) -> None:
    """Answer every request of the model that waits as failed; what comes later has the numbers that follow.

    A load among them becomes a `Poison`: the trainer must not carry it out later. Of an adapter that has failed as a
    whole, the log repeats its last steps when it is tried again; it stops to do so at `KEPT_FAILED`.
    """
    failed = protocol.OperationFailure(reason=reason, by_client=False)
    open_ = "SELECT number, what FROM client_operations WHERE adapter = ? AND failed IS NULL AND what IS NOT NULL"
    for number, what in tx.rows(open_, model.adapter):
        match _what(what):
            case protocol.LoadState():
                sql = "UPDATE client_operations SET kind = ?, what = ? WHERE adapter = ? AND number = ?"
                poison = requests.encode(protocol.Poison(reason=reason))
                tx.do(sql, ordering.OpKind.PASS, poison, model.adapter, number)
            case protocol.DropState(label=label):
                drop_label(tx, model.adapter, label)
    sql = "UPDATE client_operations SET failed = 1, outcome = ? WHERE adapter = ? AND failed IS NULL"
    tx.do(sql, requests.encode(failed), model.adapter)
    found = tx.rows("SELECT request, seq FROM requests WHERE owner = ? AND answer IS NULL", model.model)
    for request, _ in found:
        give(tx, request, failed)
    if tx.count("client_operations WHERE adapter = ? AND failed = 1", model.adapter) > KEPT_FAILED:
        _cut(tx, model, model.next_number - 1)
    if highest := max((seq for _, seq in found), default=0):
        tx.do("UPDATE models SET next_seq = MAX(next_seq, ?) WHERE model = ?", highest + 1, model.model)


def _operations(tx: Transaction, model: Model, action: object) -> list[protocol.What]:
    match action:
        case requests.Train(what=what):
            return [what]
        case requests.Save(for_sampler=for_sampler, in_flight=in_flight, name=name):
            save = protocol.SaveState(label="", moments=name is not None)  # `append` gives the label
            return [*([] if in_flight else [save]), *([protocol.Publish()] if for_sampler else [])]
        case requests.Load():
            try:
                return [load(tx, model.tenant, action)]
            except RequestError as refused:  # it was dropped while the request was held
                return [protocol.Poison(reason=refused.reason)]
    raise AssertionError(f"{type(action).__name__} has no number of its model")


def _as_sent(what: bytes | None, action: bytes | None, is_spoiled: bool) -> protocol.What:
    if is_spoiled:
        return protocol.Poison(reason="it, or the step of its window, had failed before")
    if what is not None:
        return _what(what)
    if action is not None and isinstance(decoded := requests.decode_action(action), requests.Train):
        return decoded.what
    return protocol.Poison(reason="its data are no longer there")


def _record(tx: Transaction, model: Model, number: int, outcome: protocol.Outcome) -> None:
    sql = "SELECT request, what FROM client_operations WHERE adapter = ? AND number = ? AND failed IS NULL"
    row = tx.row(sql, model.adapter, number)
    if row is None:
        return  # it has one
    request, what = row
    stored = None if isinstance(outcome, protocol.PassResult) else requests.encode(outcome)
    has_failed = isinstance(outcome, protocol.OperationFailure)
    sql = "UPDATE client_operations SET failed = ?, outcome = ? WHERE adapter = ? AND number = ?"
    tx.do(sql, has_failed, stored, model.adapter, number)
    if isinstance(outcome, protocol.PublishResult):
        tx.do("UPDATE models SET published = ? WHERE adapter = ?", outcome.version, model.adapter)
    if request:
        settle(tx, model, request, outcome)
    elif what is not None and has_failed and isinstance(dropped := _what(what), protocol.DropState):
        drop_label(tx, model.adapter, dropped.label)
    if model.of_state is not None and isinstance(outcome, protocol.OperationFailure):
        tx.do("UPDATE models SET broken = ? WHERE adapter = ?", outcome.reason, model.adapter)


def _cut(tx: Transaction, model: Model, number: int) -> None:
    """The trainer will not need again what was answered up to ``number``."""
    covered = "client_operations WHERE adapter = ? AND number <= ?"
    done = f"answer IS NOT NULL AND request IN (SELECT request FROM {covered})"
    tx.do(f"UPDATE requests SET action = NULL WHERE {done}", model.adapter, number)
    tx.do(f"DELETE FROM {covered}", model.adapter, number)
    tx.do("UPDATE models SET closed = MAX(closed, ?) WHERE adapter = ?", number, model.adapter)


def submit(tx: Transaction, tenant: str, model_id: str, seq: int, mark: str, action: requests.ModelAction) -> str:
    """Take a request, or find it taken. Raises RequestError for a model or a number that is wrong, or a full queue.

    One that names what cannot be, or is not there, or is a pass too long to keep, is taken and fails in its turn, so
    that those behind it do not wait. A load that fails spoils the window that it starts, meant for other weights.
    """
    model, request = tx.model(tenant, model_id), f"{model_id}:{seq}"
    if known(tx, request, mark):
        return request
    if model.broken:
        raise RequestError("model_id", model.broken, "make another model")
    ordering.check_seq(tx.quota(tenant), model.next_seq, seq)
    try:
        _check(tx, model, action)
    except RequestError as refused:
        wrong = str(refused)
        poison = requests.Train(what=protocol.Poison(reason=wrong, by_client=True))
        action = poison if isinstance(action, requests.Load) else requests.Refuse(reason=wrong)
    later = "SELECT seq FROM requests WHERE owner = ? AND seq >= ? AND answer IS NULL"
    held = [row[0] for row in tx.rows(later, model_id, model.next_seq)]
    data, n_bytes, others = requests.encode(action), 0, waiting(tx, tenant)
    if isinstance(action, requests.Train) and isinstance(action.what, protocol.Pass):
        n_bytes = len(data)
        wrong = ordering.too_long(tx.quota(tenant), others, n_bytes)
        if wrong and not others.queued and not _behind(tx, tenant):
            data, n_bytes = requests.encode(requests.Train(what=protocol.Poison(reason=wrong, by_client=True))), 0
    ordering.admit(tx.quota(tenant), others, held, seq, n_bytes)
    insert(tx, tenant, request, model_id, seq, mark, data)
    promote(tx, model)
    return request


def known(tx: Transaction, request: str, mark: str) -> bool:
    """Whether the request was taken before. Raises RequestError if that was another one."""
    row = tx.row("SELECT fingerprint FROM requests WHERE request = ?", request)
    if row is not None and row[0] != mark:
        raise RequestError("seq_id", "another request came with this number before", "use a new one for every request")
    return row is not None


def insert(tx: Transaction, tenant: str, request: str, owner: str, seq: int, mark: str, action: bytes) -> None:
    names = {"request": request, "tenant": tenant, "owner": owner, "seq": seq, "fingerprint": mark}
    tx.insert("requests", **names, action=action, n_bytes=len(action), at_s=tx.now_s)


def look(tx: Transaction, tenant: str, request: str) -> tuple[requests.Answer | requests.Pending, str]:
    """The answer of a request, or why there is none yet, and its adapter. Raises RequestError for another tenant's."""
    row = tx.row("SELECT answer, seq, owner FROM requests WHERE request = ? AND tenant = ?", request, tenant)
    if row is None:
        raise unknown("request_id", "request", request)
    answer, seq, owner = row
    if answer is not None:
        return requests.decode_answer(answer), ""
    [model] = tx.models("model = ?", owner)
    if seq >= model.next_seq:
        return requests.Pending(reason="a request of the model with a lower number has not come yet"), model.adapter
    return requests.Pending(reason="the trainer has not carried it out yet"), model.adapter


def waiting(tx: Transaction, tenant: str) -> ordering.QueueUsage:
    counts = "COUNT(*) FILTER (WHERE answered_s IS NULL), TOTAL(n_bytes)"
    [(queued, n_bytes)] = tx.rows(f"SELECT {counts} FROM requests WHERE tenant = ? AND action IS NOT NULL", tenant)
    return ordering.QueueUsage(queued=queued, n_bytes=int(n_bytes))


def _behind(tx: Transaction, tenant: str) -> bool:
    """Whether a checkpoint that comes by itself will free data of the tenant."""
    steps = "client_operations JOIN models USING (adapter) WHERE tenant = ? AND broken = '' AND kind = ? AND failed = 0"
    return tx.count(steps, tenant, ordering.OpKind.CLOSE) > 0


def _check(tx: Transaction, model: Model, action: requests.Action) -> None:
    """Raises RequestError for names that cannot be, or are not there."""
    match action:
        case requests.Load():
            load(tx, model.tenant, action)
        case requests.Save(name=name, sampler_seq=seq):
            check_ttl(action.ttl_s)
            if (name is None) == (seq is None) or (seq is None and action.in_flight):
                reason = "it needs a path or a sampling_session_seq_id, and an inflight one the latter"
                raise RequestError("path", reason, "give one of the two")
            if name is not None:
                _check_name(tx, model, _kind(action), name, action.overwrite)


def _check_name(tx: Transaction, model: Model, kind: Kind, name: str, overwrite: bool) -> None:
    if not STATE_NAME.fullmatch(name):
        fix = "use up to 100 of A-Z, a-z, 0-9, ., _ and -, the first a letter or a digit"
        raise RequestError("path", f"{name[:64]!r} is no name", fix)
    taken = tx.count("saved_states WHERE model = ? AND kind = ? AND name = ?", model.model, kind, name)
    if taken and not overwrite:
        raise RequestError("path", f"there is a saved state {name!r}", "choose another name, or overwrite it")
    named = tx.count("saved_states WHERE tenant = ? AND named = 1", model.tenant)
    if not taken and named >= (limit := tx.quota(model.tenant).saved):
        fix = f"delete some, or raise it: areal-lora adapters keys RUN {model.tenant} --quota saved={2 * limit}"
        raise RequestError("path", f"the quota is {limit} saved states", fix)


def check_ttl(ttl_s: float | None) -> None:
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise RequestError("ttl_seconds", f"{ttl_s:g} is not between 0 and ten years", "leave it out to keep the state")


def give(tx: Transaction, request: str, answer: requests.Answer) -> None:
    """Keep the first answer of a request. Its action is kept while the trainer may still expect it: what fails is sent
    again without data.
    """
    needed = "EXISTS (SELECT 1 FROM client_operations o WHERE o.request = requests.request AND o.failed = 0)"
    given = f"answer = ?, answered_s = ?, action = CASE WHEN {needed} THEN action END"
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
    if isinstance(action, requests.Save):
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
        case requests.Save(sampler_seq=None):
            return requests.ActionResult(path=_save(tx, model, action, numbers[0], outcomes))
        case requests.Save(sampler_seq=int(seq), in_flight=in_flight):
            made = SamplingSession(
                sampler=sampler_id(model.session, seq),
                tenant=model.tenant,
                session=model.session,
                path=None if in_flight else _save(tx, model, action, numbers[0], outcomes),
                model=model.model if in_flight else None,
                created_s=tx.now_s,
            )
            SAMPLERS.insert(tx.db, made, "ON CONFLICT DO NOTHING")
            return requests.ActionResult(sampler=made.sampler)
    raise AssertionError(f"{type(action).__name__} is answered elsewhere")


def _kind(action: requests.Save) -> Kind:
    return Kind.SAMPLER if action.for_sampler else Kind.WEIGHTS


def _save(tx: Transaction, model: Model, action: requests.Save, number: int, outcomes: list[protocol.Outcome]) -> str:
    """Note the saved state; one of this name that was there before is dropped."""
    kind = _kind(action)
    name = action.name or f".{number}"  # clients' names do not start with a dot
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

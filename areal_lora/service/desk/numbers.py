"""Operations of models: numbered without gaps, sent to the trainer, and what came of them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from areal_lora.operations.messages import (
    DropState,
    Failed,
    LoadState,
    Operation,
    Outcome,
    Pass,
    Poison,
    Publish,
    Published,
    SaveState,
    Scored,
    What,
)
from areal_lora.processes.log import get_logger
from areal_lora.service.desk.answers import drop_label, give, settle
from areal_lora.service.desk.asks import Load, Refuse, Save, SaveForSampler, Train, decode_ask, encode
from areal_lora.service.desk.books import Books
from areal_lora.service.desk.order import Fate, Op, OpKind, fate_of, kind_of, ready, sealed, spoiled
from areal_lora.service.desk.rows import Model
from areal_lora.service.refused import Refused

LOST = Failed(reason="a restart of the trainer has lost what came of it", by_client=False)
KEPT_FAILED = 512
AT_ONCE_BYTES = 32 << 20
_what: Callable[[bytes], What] = msgspec.msgpack.Decoder(What).decode

log = get_logger(__name__)


def promote(books: Books, model: Model) -> None:
    """Give numbers to the requests of ``model`` whose turn has come."""
    found = books.rows("SELECT seq, at_s FROM requests WHERE owner = ? AND held = 1", model.model)
    held = dict(found)
    begin = model.next_seq
    if (after_gap := sealed(begin, held, books.now_s)) is not None:
        missing = f"request {begin}" if after_gap == begin + 1 else f"requests {begin} to {after_gap - 1}"
        append(books, model.adapter, "", Poison(reason=f"{missing} of its window never came"))
        begin = after_gap
    for seq in ready(begin, held):
        request, ask = (
            books.row("SELECT request, ask FROM requests WHERE owner = ? AND seq = ?", model.model, seq) or ()
        )
        match decode_ask(ask):
            case Refuse(reason=reason):
                give(books, request, Failed(reason=reason, by_client=True))
            case asked:
                for what in _operations(books, model, asked):
                    append(books, model.adapter, request, what)
        books.do("UPDATE requests SET held = 0 WHERE request = ?", request)
        begin = seq + 1
    books.do("UPDATE models SET next_seq = ? WHERE model = ?", begin, model.model)


def append(books: Books, adapter: str, request: str, what: What) -> int:
    """Give ``what`` the adapter's next number. The body of a pass is that of its request."""
    ((number,),) = books.rows(
        "UPDATE models SET next_number = next_number + 1 WHERE adapter = ? RETURNING next_number - 1", adapter
    )
    if isinstance(what, SaveState):
        what = SaveState(label=f"n{number}")
    books.insert(
        "client_operations",
        adapter=adapter,
        number=number,
        request=request,
        what=None if isinstance(what, Pass) else encode(what),
        kind=kind_of(what),
    )
    books.moved.add(adapter)
    return int(number)


def load(books: Books, tenant: str, ask: Load) -> LoadState:
    """Raises Refused where nothing is saved at the path."""
    state = books.state(tenant, ask.path)
    return LoadState(adapter=state.adapter, label=state.label, optimizer=ask.optimizer)


def to_send(books: Books, adapter: str, begin: int, most: int) -> list[Operation]:
    """The operations from number ``begin`` on, as the trainer is to carry them out."""
    model = books.of_adapter(adapter)
    if model is None or model.gone or model.broken:
        return []
    ops = _ops(books, adapter)
    found = books.db.execute(
        "SELECT o.number, o.what, r.ask FROM client_operations o LEFT JOIN requests r ON r.request = o.request"
        " WHERE o.adapter = ? AND o.number >= ? ORDER BY o.number LIMIT ?",
        (adapter, begin, most),
    )
    chosen: list[Operation] = []
    n_bytes = 0
    for number, what, ask in found:
        n_bytes += len(ask or b"")
        if chosen and n_bytes > AT_ONCE_BYTES:
            break
        chosen.append(Operation(adapter=adapter, number=number, what=_as_sent(what, ask, spoiled(ops, number))))
    return chosen


def expected(books: Books, adapter: str, number: int) -> bool:
    """The trainer has the adapter, and expects ``number``. False if the desk cannot send that.

    A trainer that begins before what a checkpoint had covered has lost steps, so its clients must not go further.
    """
    model = books.of_adapter(adapter)
    if model is None or model.gone or model.broken:
        return False
    if not model.closed < number <= model.next_number:
        reason = (
            f"the trainer's newest checkpoint expects operation {number}, but those from {model.closed + 1} to"
            f" {model.next_number} can be sent: its checkpoints or the service's file were replaced by older ones"
        )
        log.error("%s: %s", adapter, reason)
        books.do("UPDATE models SET broken = ? WHERE adapter = ?", reason, adapter)
        fail_open(books, model, reason)
        return False
    if not model.joined:
        books.do("UPDATE models SET joined = 1 WHERE adapter = ?", adapter)
        settle(books, model, f"{model.model}:create", None)
    return True


def completed(books: Books, adapter: str, number: int, outcome: Outcome) -> None:
    """Keep the first outcome of an operation. Those before it without one are lost."""
    model = books.of_adapter(adapter)
    if model is None:
        return
    lost = books.rows(
        "SELECT number FROM client_operations WHERE adapter = ? AND number < ? AND fate IS NULL", adapter, number
    )
    for (earlier,) in lost:
        _record(books, model, earlier, LOST)
    _record(books, model, number, outcome)
    closes = books.row("SELECT kind FROM client_operations WHERE adapter = ? AND number = ?", adapter, number)
    if closes == (OpKind.CLOSE,):
        _close(books, model, number, outcome)


def fail_open(books: Books, model: Model, reason: str) -> None:
    """Answer every request of the model that waits as failed; what comes later has the numbers that follow.

    A load among them becomes a `Poison`: the trainer must not carry it out later.
    """
    failed = Failed(reason=reason, by_client=False)
    for number, what in books.rows(
        "SELECT number, what FROM client_operations WHERE adapter = ? AND fate IS NULL AND what IS NOT NULL",
        model.adapter,
    ):
        match _what(what):
            case LoadState():
                books.do(
                    "UPDATE client_operations SET kind = ?, what = ? WHERE adapter = ? AND number = ?",
                    OpKind.PASS,
                    encode(Poison(reason=reason)),
                    model.adapter,
                    number,
                )
            case DropState(label=label):
                drop_label(books, model.adapter, label)
    books.do(
        "UPDATE client_operations SET fate = ?, outcome = ? WHERE adapter = ? AND fate IS NULL",
        Fate.FAILED,
        encode(failed),
        model.adapter,
    )
    found = books.rows("SELECT request, seq FROM requests WHERE owner = ? AND answer IS NULL", model.model)
    for request, _ in found:
        give(books, request, failed)
        books.do("UPDATE requests SET ask = NULL WHERE request = ?", request)
    if highest := max((seq for _, seq in found), default=0):
        books.do("UPDATE models SET next_seq = MAX(next_seq, ?) WHERE model = ?", highest + 1, model.model)


def _operations(books: Books, model: Model, ask: object) -> list[What]:
    match ask:
        case Train(what=what):
            return [what]
        case Save():
            return [SaveState(label="")]  # `append` names it
        case SaveForSampler(in_flight=in_flight):
            return [Publish()] if in_flight else [SaveState(label=""), Publish()]
        case Load():
            try:
                return [load(books, model.tenant, ask)]
            except Refused as refused:  # it was dropped while the request was held
                return [Poison(reason=refused.reason)]
    raise AssertionError(f"{type(ask).__name__} has no number of its model")


def _as_sent(what: bytes | None, ask: bytes | None, is_spoiled: bool) -> What:
    if is_spoiled:
        return Poison(reason="it, or the step of its window, had failed before")
    if what is not None:
        return _what(what)
    asked = decode_ask(ask) if ask is not None else None
    return asked.what if isinstance(asked, Train) else Poison(reason="its data are no longer there")


def _record(books: Books, model: Model, number: int, outcome: Outcome) -> None:
    row = books.row(
        "SELECT request, what FROM client_operations WHERE adapter = ? AND number = ? AND fate IS NULL",
        model.adapter,
        number,
    )
    if row is None:
        return  # it has one
    request, what = row
    stored = None if isinstance(outcome, Scored) else encode(outcome)
    books.do(
        "UPDATE client_operations SET fate = ?, outcome = ? WHERE adapter = ? AND number = ?",
        fate_of(outcome),
        stored,
        model.adapter,
        number,
    )
    if isinstance(outcome, Published):
        books.do("UPDATE models SET published = ? WHERE adapter = ?", outcome.version, model.adapter)
    if request:
        settle(books, model, request, outcome)
    elif what is not None and isinstance(dropped := _what(what), DropState) and isinstance(outcome, Failed):
        drop_label(books, model.adapter, dropped.label)
    if model.of_state is not None and isinstance(outcome, Failed):
        books.do("UPDATE models SET broken = ? WHERE adapter = ?", outcome.reason, model.adapter)


def _close(books: Books, model: Model, number: int, outcome: Outcome) -> None:
    """What the trainer will not ask for again once ``number`` has ended the window.

    Of a failed window no data are needed: it fails again. That it failed is kept until a later one succeeds, because
    an adapter that has failed as a whole has no checkpoint of it.
    """
    books.do(
        "UPDATE requests SET ask = NULL WHERE answer IS NOT NULL AND request IN"
        " (SELECT request FROM client_operations WHERE adapter = ? AND number <= ?)",
        model.adapter,
        number,
    )
    failed = books.row(
        "SELECT COUNT(*) FROM client_operations WHERE adapter = ? AND number <= ?", model.adapter, number
    )
    if isinstance(outcome, Failed) and failed is not None and failed[0] <= KEPT_FAILED:
        return
    books.do("DELETE FROM client_operations WHERE adapter = ? AND number <= ?", model.adapter, number)
    books.do("UPDATE models SET closed = MAX(closed, ?) WHERE adapter = ?", number, model.adapter)


def _ops(books: Books, adapter: str) -> list[Op]:
    found = books.rows("SELECT number, kind, fate FROM client_operations WHERE adapter = ? ORDER BY number", adapter)
    return [Op(number=number, kind=OpKind(kind), fate=Fate(fate) if fate else None) for number, kind, fate in found]

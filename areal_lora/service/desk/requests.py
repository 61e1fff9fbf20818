"""Requests with a number of their model: taken once, in any order, and found again."""

from __future__ import annotations

from collections.abc import Collection

from areal_lora.operations.messages import Pass, Poison
from areal_lora.service.desk.asks import (
    Answer,
    Ask,
    Load,
    OfModel,
    Pending,
    Refuse,
    Save,
    SaveForSampler,
    Train,
    decode_answer,
    encode,
)
from areal_lora.service.desk.books import Books, unknown
from areal_lora.service.desk.numbers import load, promote
from areal_lora.service.desk.order import Waiting, admit, too_long
from areal_lora.service.desk.rows import STATE_NAME, Kind, Model
from areal_lora.service.refused import Refused

MOST_TTL_S = 10 * 366 * 86400.0


def submit(books: Books, tenant: str, model_id: str, seq: int, fingerprint: str, ask: OfModel) -> str:
    """Take a request, or find it taken. Raises Refused for a model or a number that is wrong, or a full queue.

    One that names what cannot be, or is not there, or is a pass too long to keep, is taken and fails in its turn, so
    that those behind it do not wait. A load that fails spoils the window that it begins: its passes were meant for
    other weights.
    """
    model, request = books.model(tenant, model_id), f"{model_id}:{seq}"
    if known(books, request, fingerprint):
        return request
    if model.broken:
        raise Refused(422, "model_id", model.broken, "make another model")
    try:
        _check(books, model, ask)
    except Refused as refused:
        wrong = str(refused)
        ask = Train(what=Poison(reason=wrong, by_client=True)) if isinstance(ask, Load) else Refuse(reason=wrong)
    held = [row[0] for row in books.rows("SELECT seq FROM requests WHERE owner = ? AND held = 1", model_id)]
    data, n_bytes, others = encode(ask), 0, waiting(books, tenant)
    if isinstance(ask, Train) and isinstance(ask.what, Pass):
        n_bytes = len(data)
        if not others.queued and (wrong := too_long(books.quota(tenant), others, n_bytes)):
            data, n_bytes = encode(Train(what=Poison(reason=wrong, by_client=True))), 0
    admit(books.quota(tenant), others, model.next_seq, held, seq, n_bytes)
    insert(books, tenant, request, model_id, seq, fingerprint, data, held=True)
    promote(books, model)
    return request


def known(books: Books, request: str, fingerprint: str) -> bool:
    """Whether the request was taken before. Raises Refused if that was another one."""
    row = books.row("SELECT fingerprint FROM requests WHERE request = ?", request)
    if row is not None and row[0] != fingerprint:
        reason = "another request came with this number before"
        raise Refused(422, "seq_id", reason, "use a new number for every request")
    return row is not None


def insert(
    books: Books, tenant: str, request: str, owner: str, seq: int, fingerprint: str, ask: bytes, *, held: bool
) -> None:
    books.insert(
        "requests",
        request=request,
        tenant=tenant,
        owner=owner,
        seq=seq,
        fingerprint=fingerprint,
        ask=ask,
        n_bytes=len(ask),
        at_s=books.now_s,
        held=held,
    )


def look(books: Books, tenant: str, request: str) -> tuple[Answer | Pending, str]:
    """The answer of a request, or why there is none yet, and its adapter. Raises Refused for another tenant's."""
    row = books.row("SELECT answer, held, owner FROM requests WHERE request = ? AND tenant = ?", request, tenant)
    if row is None:
        raise unknown("request_id", "request", request)
    answer, held, owner = row
    if answer is not None:
        return decode_answer(answer), ""
    [model] = books.models("model = ?", owner)
    if held:
        return Pending(reason="a request of the model with a lower number has not come yet"), model.adapter
    return Pending(reason="the trainer has not carried it out yet"), model.adapter


def waiting(books: Books, tenant: str) -> Waiting:
    row = books.row(
        "SELECT COUNT(*) FILTER (WHERE answer IS NULL), TOTAL(n_bytes) FROM requests"
        " WHERE tenant = ? AND ask IS NOT NULL",
        tenant,
    )
    assert row is not None
    return Waiting(queued=row[0], n_bytes=int(row[1]))


def _check(books: Books, model: Model, ask: Ask) -> None:
    """Raises Refused for names that cannot be, or are not there."""
    match ask:
        case Load():
            load(books, model.tenant, ask)
        case Save(name=name, overwrite=overwrite, ttl_s=ttl_s):
            check_ttl(ttl_s)
            _check_name(books, model, Kind.WEIGHTS, name, overwrite)
        case SaveForSampler(name=name, sampler_seq=seq, ttl_s=ttl_s):
            check_ttl(ttl_s)
            if (name is None) == (seq is None) or (seq is not None and not 0 <= seq < 1 << 53):
                raise Refused(422, "path", "it needs a path or a sampling_session_seq_id", "give one of the two")
            if name is not None:
                _check_name(books, model, Kind.SAMPLER, name, overwrite=True)


def _check_name(books: Books, model: Model, kind: Kind, name: str, overwrite: bool) -> None:
    if not STATE_NAME.fullmatch(name):
        fix = "use up to 100 of A-Z, a-z, 0-9, ., _ and -, the first a letter or a digit"
        raise Refused(422, "path", f"{name[:64]!r} is no name", fix)
    states = books.states("tenant = ?", model.tenant)
    _check_saved(books, model, [state.path for state in states if state.named])
    taken = any((state.model, state.kind, state.name) == (model.model, kind, name) for state in states)
    if taken and not overwrite:
        raise Refused(422, "path", f"there is a saved state {name!r}", "choose another name, or overwrite it")


def _check_saved(books: Books, model: Model, saved: Collection[str]) -> None:
    if len(saved) >= (most := books.quota(model.tenant).saved):
        raise Refused(422, "path", f"the quota is {most} saved states", "delete some first")


def check_ttl(ttl_s: float | None) -> None:
    if ttl_s is not None and not 0 < ttl_s <= MOST_TTL_S:
        raise Refused(422, "ttl_seconds", f"{ttl_s:g} is not between 0 and ten years", "leave it out to keep the state")

"""What the desk does by itself, again and again: seals gaps, ends what is silent, removes what no one needs.

Kept until then:
- the data of a pass: until a step or a load of its model that follows has succeeded, or its own step has failed;
- an answer: `FETCHED_S` after it was fetched, else `ANSWERED_S`; and while a tenant's are not too long together;
- a state that only a sampling session has: `UNUSED_S` after its last use; a named one: until its time, or for ever;
- a model: `signs.SILENT_S` after the last heartbeat of its session, or `signs.DEAD_S` if another client waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from areal_lora.operations.messages import DropState
from areal_lora.service.desk.books import Books
from areal_lora.service.desk.models import end_session, expire, leave
from areal_lora.service.desk.numbers import append, fail_open, promote

FETCHED_S, ANSWERED_S = 3600.0, 86400.0
UNUSED_S = 3600.0
ENDED_S = 30 * 86400.0
MOST_ENDED = 1024
"""Sessions and models that are gone are forgotten after that time, and the oldest of a tenant above that number."""


def seal(books: Books) -> None:
    """Go past requests that never came."""
    for model in books.models(
        "gone = 0 AND EXISTS (SELECT 1 FROM requests r WHERE r.owner = models.model AND r.held = 1)"
    ):
        promote(books, model)


def end_silent(books: Books, silent: Iterable[str]) -> None:
    for session in silent:
        end_session(books, session)


def follow(books: Books, failed: Mapping[str, str]) -> None:
    """Adapters that were deleted or have ``failed``, with the reason: their requests have no other answer."""
    for model in books.models("gone = 0"):
        row = books.tables.adapters.get((model.tenant, model.name))
        if row is None or row.incarnation != model.incarnation:
            leave(books, model, "its adapter was deleted")
        elif model.adapter in failed:
            fail_open(books, model, f"its adapter has failed: {failed[model.adapter]}")
            if model.of_state is not None:
                books.do("UPDATE models SET broken = ? WHERE model = ?", failed[model.adapter], model.model)


def expire_states(books: Books, used_s: Mapping[str, float], begin_s: float) -> None:
    """``used_s``: when a path was sampled last; one that was not since the start counts from ``begin_s``."""
    for state in books.states("expires_s <= ? OR (named = 0 AND expires_s IS NULL)", books.now_s):
        last = max(state.created_s, used_s.get(state.path, begin_s))
        if state.expires_s is not None or books.now_s - last > UNUSED_S:
            expire(books, state)


def drop_states(books: Books) -> list[tuple[str, str]]:
    """Have the trainer drop states of models that are there; returns adapter and label of the others."""
    gone = []
    for adapter, label in books.rows("SELECT adapter, label FROM dropped_states"):
        model = books.of_adapter(adapter)
        if model is None or model.gone:
            gone.append((adapter, label))
        elif model.joined and not model.broken:
            append(books, adapter, "", DropState(label=label))
            books.do("DELETE FROM dropped_states WHERE adapter = ? AND label = ?", adapter, label)
    return gone


def dropped(books: Books, adapter: str, label: str) -> None:
    """The files are removed."""
    books.do("DELETE FROM dropped_states WHERE adapter = ? AND label = ?", adapter, label)


def forget(books: Books, fetched: set[str]) -> None:
    """Answers that no one needs."""
    for request in fetched:
        books.do("UPDATE requests SET fetched_s = ? WHERE request = ? AND fetched_s IS NULL", books.now_s, request)
    books.do(
        "DELETE FROM requests WHERE answer IS NOT NULL AND ask IS NULL AND (fetched_s < ? OR answered_s < ?)",
        books.now_s - FETCHED_S,
        books.now_s - ANSWERED_S,
    )
    for tenant, quota in books.tables.quotas.items():
        _shorten(books, tenant, quota.queued_mib << 20)
    for table, over in (("models", "gone"), ("sessions", "ended")):
        books.do(f"DELETE FROM {table} WHERE {over} = 1 AND created_s < ?", books.now_s - ENDED_S)
        for tenant in books.tables.quotas:
            books.do(
                f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE tenant = ? AND {over} = 1"
                " ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                tenant,
                MOST_ENDED,
            )


def _shorten(books: Books, tenant: str, most: int) -> None:
    """Forget the tenant's oldest answers, fetched ones first, until those that stay are at most ``most`` bytes."""
    found = books.rows(
        "SELECT request, LENGTH(answer) FROM requests WHERE tenant = ? AND answer IS NOT NULL AND ask IS NULL"
        " ORDER BY fetched_s IS NOT NULL, answered_s DESC",
        tenant,
    )
    total = 0
    for request, n_bytes in found:
        total += n_bytes
        if total > most:
            books.do("DELETE FROM requests WHERE request = ?", request)

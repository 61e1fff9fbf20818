"""What the queue does by itself, again and again: seals gaps, ends what is silent, removes what no one needs.

Kept until then:
- the data of a pass: until a step or a load of its model that follows has succeeded, or its own step has failed;
- an answer: `FETCHED_S` after it was fetched, else `ANSWERED_S`; and while a tenant's are not too long together;
- a state that only a sampling session has: `UNUSED_S` after its last use; a named one: until its time, or for ever;
- a model: `placement.SILENT_S` after the last heartbeat of its session, or `placement.DEAD_S` if another client waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from areal_lora.operations.protocol import DropState
from areal_lora.service.queue.client_sessions import end_session, expire, leave
from areal_lora.service.queue.queue_store import Transaction
from areal_lora.service.queue.sequencer import append, fail_open, promote

FETCHED_S, ANSWERED_S = 3600.0, 86400.0
UNUSED_S = 3600.0
ENDED_S = 30 * 86400.0
MAX_ENDED = 1024
"""Sessions and models that have ended are forgotten after that time, and the oldest of a tenant above that number."""


def seal(tx: Transaction) -> None:
    """Go past requests that never came."""
    for model in tx.models(
        "removed = 0 AND EXISTS (SELECT 1 FROM requests r WHERE r.owner = models.model AND r.held = 1)"
    ):
        promote(tx, model)


def end_silent(tx: Transaction, silent: Iterable[str]) -> None:
    for session in silent:
        end_session(tx, session)


def follow(tx: Transaction, failed: Mapping[str, str]) -> None:
    """Adapters that were deleted or have ``failed``, with the reason: their requests have no other answer."""
    for model in tx.models("removed = 0"):
        row = tx.tables.adapters.get((model.tenant, model.name))
        if row is None or row.incarnation != model.incarnation:
            leave(tx, model, "its adapter was deleted")
        elif model.adapter in failed:
            fail_open(tx, model, f"its adapter has failed: {failed[model.adapter]}")
            if model.of_state is not None:
                tx.do("UPDATE models SET broken = ? WHERE model = ?", failed[model.adapter], model.model)


def expire_states(tx: Transaction, used_s: Mapping[str, float], start_s: float) -> None:
    """``used_s``: when a path was sampled last; one that was not since the start counts from ``start_s``."""
    for state in tx.states("expires_s <= ? OR (named = 0 AND expires_s IS NULL)", tx.now_s):
        last = max(state.created_s, used_s.get(state.path, start_s))
        if state.expires_s is not None or tx.now_s - last > UNUSED_S:
            expire(tx, state)


def drop_states(tx: Transaction) -> list[tuple[str, str]]:
    """Have the trainer drop states of models that are there; returns adapter and label of the others."""
    removed = []
    for adapter, label in tx.rows("SELECT adapter, label FROM dropped_states"):
        model = tx.of_adapter(adapter)
        if model is None or model.removed:
            removed.append((adapter, label))
        elif model.joined and not model.broken:
            append(tx, adapter, "", DropState(label=label))
            tx.do("DELETE FROM dropped_states WHERE adapter = ? AND label = ?", adapter, label)
    return removed


def dropped(tx: Transaction, adapter: str, label: str) -> None:
    """The files are removed."""
    tx.do("DELETE FROM dropped_states WHERE adapter = ? AND label = ?", adapter, label)


def forget(tx: Transaction, fetched: set[str]) -> None:
    """Answers that no one needs."""
    for request in fetched:
        tx.do("UPDATE requests SET fetched_s = ? WHERE request = ? AND fetched_s IS NULL", tx.now_s, request)
    tx.do(
        "DELETE FROM requests WHERE answer IS NOT NULL AND action IS NULL AND (fetched_s < ? OR answered_s < ?)",
        tx.now_s - FETCHED_S,
        tx.now_s - ANSWERED_S,
    )
    for tenant, quota in tx.tables.quotas.items():
        _shorten(tx, tenant, quota.queued_mib << 20)
    for table, over in (("models", "removed"), ("sessions", "ended")):
        tx.do(f"DELETE FROM {table} WHERE {over} = 1 AND created_s < ?", tx.now_s - ENDED_S)
        for tenant in tx.tables.quotas:
            tx.do(
                f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE tenant = ? AND {over} = 1"
                " ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                tenant,
                MAX_ENDED,
            )


def _shorten(tx: Transaction, tenant: str, most: int) -> None:
    """Forget the tenant's oldest answers, fetched ones first, until those that stay are at most ``most`` bytes."""
    found = tx.rows(
        "SELECT request, LENGTH(answer) FROM requests WHERE tenant = ? AND answer IS NOT NULL AND action IS NULL"
        " ORDER BY fetched_s IS NOT NULL, answered_s DESC",
        tenant,
    )
    total = 0
    for request, n_bytes in found:
        total += n_bytes
        if total > most:
            tx.do("DELETE FROM requests WHERE request = ?", request)

"""The one thread that changes the service's file: decide, commit, write the desired state, then answer.

What the queue does by itself, again and again: seals gaps, ends what is silent, removes what no one needs.

Kept until then:
- the data of a pass: until a checkpoint has it, or it has failed;
- an answer: `FETCHED_S` after it was fetched, else `ANSWERED_S`; and while a tenant's are not too long together;
- a state that only a sampling session has: `UNUSED_S` after its last use, `OVERTAKEN_S` if its model has `MAX_UNNAMED`
  newer ones and none of its samples is waited for; a named one: until its time, or for ever;
- a model: `placement.SILENT_S` after the last heartbeat of its session, or `placement.DEAD_S` if another client waits.
"""

import asyncio
import contextlib
import errno
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from areal_lora.errors import RecordError, RequestError, Unavailable, internal_error
from areal_lora.operations.protocol import DropState
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached, watched_thread
from areal_lora.run_folder.paths import DesiredAdapters, RunFolder, read_desired, write_desired
from areal_lora.service.queue.client_sessions import Phases, carried_out, expire, leave
from areal_lora.service.queue.queue_rows import Tables
from areal_lora.service.queue.queue_store import Store, Transaction
from areal_lora.service.queue.sequencer import append, fail_open, promote

log = get_logger(__name__)

T = TypeVar("T")


class Writer:
    """Owns the store. ``tables`` are those of the last commit, readable from any thread; ``phases`` gives the run's.

    Making one rewrites the desired state from the tables: an earlier process may have ended between the two.
    """

    def __init__(self, store: Store, run_folder: RunFolder, phases: Callable[[], Phases]) -> None:
        self._store, self._folder, self._phases = store, run_folder, phases
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._written: object = None  # the adapters of the desired state in its file, as the tables have them
        self._write_desired()
        self._thread = watched_thread("service-writer", self._run)

    @property
    def tables(self) -> Tables:
        return self._store.tables

    def close(self) -> None:
        """Finish the jobs in the queue, then end."""
        self._jobs.put(None)
        self._thread.join()
        self._store.close()

    async def change(self, work: Callable[[Transaction], T], now_s: float | None = None) -> tuple[T, Transaction]:
        """``work``'s result and transaction once it is durable. Raises RequestError, and then nothing has changed.

        The run can read the adapters then, or once its disk takes the desired state.
        """
        return await self._in_thread(lambda: self._change(work, time.time() if now_s is None else now_s))

    async def settle(self) -> None:
        """Stop counting the operations that the run has carried out, and write a desired state that is missing."""
        if self._written is not self.tables.adapters or carried_out(self.tables, self._phases()):
            with contextlib.suppress(Unavailable):  # the next call repeats it
                await self._in_thread(self._settle)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """``work``'s result in this thread. Raises RequestError, with status 500 for an unexpected exception.

        RecordError ends the process: the file is damaged.
        """
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return  # its caller has left
            try:
                future.set_result(work())
            except RequestError as refused:
                future.set_exception(refused)
            except RecordError:
                raise
            except Exception:  # fault boundary: the request of one caller
                log.exception("a request failed and was rolled back")
                future.set_exception(internal_error())

        self._jobs.put(job)
        return await asyncio.wrap_future(future)

    def _change(self, work: Callable[[Transaction], T], now_s: float) -> tuple[T, Transaction]:
        before = self.tables.adapters
        changed = self._store.change(work, now_s)
        if self.tables.adapters is not before:
            reached("service.committed")
            with contextlib.suppress(Unavailable):  # the change is durable; `settle` repeats it
                self._write_desired()
            reached("service.desired")
        return changed

    def _write_desired(self) -> None:
        """Write the desired state of the tables unless the file has it, if only of an attempt that failed afterwards.

        Raises Unavailable.
        """
        adapters = self.tables.adapters
        if adapters is self._written:
            return
        wanted, path = self.tables.desired(), self._folder.desired
        try:
            there = read_desired(self._folder)
            if there.adapters != wanted or not path.exists():
                write_desired(self._folder, DesiredAdapters(generation=there.generation + 1, adapters=wanted))
        except OSError as error:
            log.warning("%s cannot be written, repeated soon: %s", path, error)
            status = 507 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 503
            raise Unavailable(status, f"{path.name} cannot be written: {error.strerror}") from error
        self._written = adapters

    def _settle(self) -> None:
        self._write_desired()
        if done := carried_out(self.tables, self._phases()):
            self._store.change(lambda tx: tx.carried_out(done), time.time())
            self._written = self.tables.adapters  # what is desired is as before


FETCHED_S, ANSWERED_S = 3600.0, 86400.0
UNUSED_S, OVERTAKEN_S, MAX_UNNAMED = 3600.0, 300.0, 8
ENDED_S = 30 * 86400.0
MAX_ENDED = 1024
"""Sessions and models that have ended are forgotten after that time, and the oldest of a tenant above that number."""
_KEPT = "requests WHERE answer IS NOT NULL AND action IS NULL"


def seal(tx: Transaction) -> None:
    """Go past requests that never came."""
    waits = "removed = 0 AND EXISTS (SELECT 1 FROM requests WHERE owner = model AND seq >= next_seq AND answer IS NULL)"
    for model in tx.models(waits):
        promote(tx, model)


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
    """``used_s``: when a path was sampled last; one that was not since ``start_s`` counts from then."""
    waited_for = "samples JOIN samplers USING (sampler) WHERE path = ?"
    newer: dict[str, int] = {}  # by model, states of sampling sessions that were saved later
    for state in reversed(tx.states("named = 0 OR expires_s <= ?", tx.now_s)):
        over = state.expires_s is not None and state.expires_s <= tx.now_s
        if not state.named:
            unused_s = tx.now_s - max(state.created_s, start_s, used_s.get(state.path, start_s))
            overtaken = newer.get(state.model, 0) >= MAX_UNNAMED and unused_s > OVERTAKEN_S
            newer[state.model] = newer.get(state.model, 0) + 1
            over = over or (unused_s > UNUSED_S and state.expires_s is None)
            over = over or (overtaken and not tx.count(waited_for, state.path))
        if over:
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


def dropped(tx: Transaction, states: Iterable[tuple[str, str]]) -> None:
    """Their files are removed."""
    tx.db.executemany("DELETE FROM dropped_states WHERE adapter = ? AND label = ?", states)


def forget(tx: Transaction, fetched: set[str]) -> None:
    """Answers that no one needs."""
    for request in fetched:
        tx.do("UPDATE requests SET fetched_s = ? WHERE request = ? AND fetched_s IS NULL", tx.now_s, request)
    old = f"{_KEPT} AND (fetched_s < ? OR answered_s < ?)"
    tx.do(f"DELETE FROM {old}", tx.now_s - FETCHED_S, tx.now_s - ANSWERED_S)
    # One pass over all answers, whatever the number of tenants; materialized, or it would sort the answers themselves.
    lengths = f"WITH kept AS MATERIALIZED (SELECT tenant, LENGTH(answer) AS n_bytes FROM {_KEPT})"
    for tenant, n_bytes in tx.rows(f"{lengths} SELECT tenant, SUM(n_bytes) FROM kept GROUP BY tenant"):
        if n_bytes > (most := tx.quota(tenant).queued_mib << 20):
            _shorten(tx, tenant, most)
    for table, over in (("models", "removed"), ("sessions", "ended")):
        tx.do(f"DELETE FROM {table} WHERE {over} = 1 AND created_s < ?", tx.now_s - ENDED_S)
        many = f"SELECT tenant FROM {table} WHERE {over} = 1 GROUP BY tenant HAVING COUNT(*) > ?"
        old = f"SELECT rowid FROM {table} WHERE tenant = ? AND {over} = 1 ORDER BY rowid DESC LIMIT -1 OFFSET ?"
        for (tenant,) in tx.rows(many, MAX_ENDED):
            tx.do(f"DELETE FROM {table} WHERE rowid IN ({old})", tenant, MAX_ENDED)


def _shorten(tx: Transaction, tenant: str, most: int) -> None:
    """Forget the tenant's oldest answers, fetched ones first, until those that stay are at most ``most`` bytes."""
    order, total = "fetched_s IS NOT NULL, answered_s DESC", 0
    found = f"SELECT request, LENGTH(answer) FROM {_KEPT} AND tenant = ? ORDER BY {order}"
    for request, n_bytes in tx.rows(found, tenant):
        total += n_bytes
        if total > most:
            tx.do("DELETE FROM requests WHERE request = ?", request)

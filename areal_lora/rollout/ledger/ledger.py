"""The run ledger: what became of every issued group, in one SQLite file of the run (contract C8).

    issued -> running -> done -> leased(step) -> consumed(step)
       ^________| retry    ^________|  rolled back      every state but consumed may become dropped(reason)

A row is one issue of one prompt; ``(position, issue)`` is unique and identifies a request. At all times
``issued = consumed + dropped + live``. A rollback turns consumed rows into dropped ones; a prompt that is issued
again after a drop gets a new row.

Writes collect in one transaction until :meth:`Ledger.flush`. A controller that dies before loses them, which is
harmless while no other process has seen them: see `controller/pool`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from areal_lora.errors import ConfigError, RolloutError
from areal_lora.rollout.ledger.file import (
    LIVE,
    SCHEMA_VERSION,
    GroupState,
    Head,
    LedgerError,
    LedgerFile,
    LedgerRow,
    LedgerSnapshot,
    OpenGroup,
)

_COLUMNS = "seq, position, issue, stale, state, failed, resampled, version, newest, step"


class GroupTable:
    """One row per issue, and the trajectories (``payload``) of finished groups."""

    def __init__(self, file: LedgerFile, adapter: str) -> None:
        self._file, self._adapter = file, adapter

    def insert(self, group: OpenGroup) -> None:
        self._file.execute(
            "INSERT INTO groups (adapter, seq, position, issue, stale, state, failed, resampled) "
            "VALUES (?, ?, ?, ?, ?, 0, ?, ?)",
            (self._adapter, group.seq, group.position, group.issue, group.stale, group.failed, group.resampled),
        )

    def update(self, seq: int, **columns: Any) -> None:
        changes = ", ".join(f"{name} = ?" for name in columns)
        self._file.execute(
            f"UPDATE groups SET {changes} WHERE adapter = ? AND seq = ?", (*columns.values(), self._adapter, seq)
        )

    def rows(self, *states: GroupState) -> list[LedgerRow]:
        marks = ", ".join(str(int(state)) for state in states)
        found = self._file.execute(
            f"SELECT {_COLUMNS} FROM groups WHERE adapter = ? AND state IN ({marks}) ORDER BY seq", (self._adapter,)
        )
        names = _COLUMNS.split(", ")
        return [
            LedgerRow(**dict(zip(names, values, strict=True)) | {"state": GroupState(values[4])}) for values in found
        ]

    def keep_payload(self, seq: int, payload: bytes) -> None:
        self._file.execute("INSERT INTO trajectories VALUES (?, ?, ?)", (self._adapter, seq, payload))

    def payload(self, seq: int) -> bytes:
        row = self._file.execute(
            "SELECT payload FROM trajectories WHERE adapter = ? AND seq = ?", (self._adapter, seq)
        ).fetchone()
        if row is None:
            raise LedgerError(f"{self._file.path}: issue {seq} of {self._adapter} has no trajectories")
        payload: bytes = row[0]
        return payload

    def delete_payload(self, seq: int) -> None:
        self._file.execute("DELETE FROM trajectories WHERE adapter = ? AND seq = ?", (self._adapter, seq))

    def totals(self) -> Iterator[tuple[GroupState, str, int]]:
        """State, reason and number of rows, for each state and reason."""
        return self._totals("", ())

    def take_closed(self, before: int) -> list[tuple[GroupState, str, int]]:
        """Delete the rows that were closed at steps before ``before``, and return their totals."""
        closed = "AND state >= 4 AND step < ?"
        totals = list(self._totals(closed, (before,)))
        self._file.execute(f"DELETE FROM groups WHERE adapter = ? {closed}", (self._adapter, before))
        return totals

    def _totals(self, condition: str, arguments: tuple[Any, ...]) -> Iterator[tuple[GroupState, str, int]]:
        for state, reason, n in self._file.execute(
            f"SELECT state, reason, COUNT(*) FROM groups WHERE adapter = ? {condition} GROUP BY state, reason",
            (self._adapter, *arguments),
        ):
            yield GroupState(state), reason, n

    def clear(self) -> None:
        for table in ("groups", "trajectories"):
            self._file.execute(f"DELETE FROM {table} WHERE adapter = ?", (self._adapter,))


KEEP_STEPS = 64  # steps whose closed rows are kept, for a trainer that falls back so far
FOLD_EVERY = 16  # committed steps
_S = GroupState


class Ledger:
    """One adapter's groups. Methods raise LedgerError for a move the diagram does not show.

    ``known``: the file had this adapter when it was opened. ``counts`` by state and ``drop_reasons`` include folded
    rows.
    """

    def __init__(self, file: LedgerFile, adapter: str, order: str) -> None:
        """``order`` is the digest of the adapter's prompt stream; raises ConfigError if the rows are of another."""
        self._file, self.adapter = file, adapter
        self.table = GroupTable(file, adapter)
        head = file.read_head(adapter)
        self.known = head is not None
        self.head = head or Head(order=order)
        if self.head.order != order:
            raise ConfigError(
                file.path,
                f"its prompts of {adapter} are of another task, size or seed",
                "start with the task and run.seed of this run, or a new run with --fresh",
            )
        self._load()

    def reset(self, head: Head, groups: Iterable[OpenGroup]) -> None:
        """Replace everything by ``head`` and ``groups``, which are issued."""
        self.table.clear()
        self.head = head
        for group in groups:
            self.table.insert(group)
        self._load()

    def _load(self) -> None:
        self._file.heads[self.adapter] = self.head
        self.counts, self.drop_reasons = _totals(self.table, self.head)
        self._states = {row.seq: row.state for row in self.table.rows(*LIVE)}

    # ------------------------------------------------------------ moves of a group

    def issue(self, position: int, issue: int, stale: int = 0) -> int:
        seq = self.head.issued
        self.table.insert(OpenGroup(seq, position, issue, stale, 0, 0))
        self.head.issued += 1
        self.counts[_S.ISSUED] += 1
        self._states[seq] = _S.ISSUED
        return seq

    def run(self, seq: int, version: int, deadline: float) -> None:
        self._move(seq, (_S.ISSUED,), _S.RUNNING, version=version, deadline_s=deadline)

    def requeue(self, seq: int, failed: int, resampled: int) -> None:
        self._move(seq, (_S.RUNNING,), _S.ISSUED, failed=failed, resampled=resampled)

    def finish(self, seq: int, oldest: int, newest: int, payload: bytes) -> None:
        """A late answer may arrive while the group waits for its next try."""
        self._move(seq, (_S.RUNNING, _S.ISSUED), _S.DONE, version=oldest, newest=newest)
        self.table.keep_payload(seq, payload)

    def lease(self, seqs: Iterable[int], step: int) -> None:
        for seq in seqs:
            self._move(seq, (_S.DONE,), _S.LEASED, step=step)

    def unlease(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self._move(seq, (_S.LEASED,), _S.DONE, step=-1)

    def consume(self, step: int) -> None:
        """Every group leased at ``step`` or before is consumed; its trajectories are deleted."""
        for row in self.table.rows(_S.LEASED):
            if row.step <= step:
                self._move(row.seq, (_S.LEASED,), _S.CONSUMED, reason="")
                self.table.delete_payload(row.seq)
                del self._states[row.seq]
        if step + 1 - KEEP_STEPS - self.head.known_from >= FOLD_EVERY:
            _fold(self.table, self.head, step + 1 - KEEP_STEPS)

    def drop(self, seq: int, reason: str) -> None:
        self._move(seq, LIVE, _S.DROPPED, reason=reason, step=self.head.next_version)
        self.table.delete_payload(seq)
        self.drop_reasons[reason] += 1

    def undo(self, seq: int, reason: str) -> None:
        """Drop a consumed group whose step is undone."""
        self._states[seq] = _S.CONSUMED
        self._move(seq, (_S.CONSUMED,), _S.DROPPED, reason=reason, step=self.head.next_version)
        self.drop_reasons[reason] += 1

    def _move(self, seq: int, allowed: Sequence[GroupState], state: GroupState, **columns: Any) -> None:
        before = self._states.get(seq)
        if before is None or before not in allowed:
            found = f"is {before.name.lower()}" if before is not None else "is not live"
            raise LedgerError(
                f"{self._file.path}: issue {seq} of {self.adapter} {found} and cannot become {state.name.lower()}"
            )
        self.table.update(seq, state=int(state), **columns)
        self.counts[before] -= 1
        self.counts[state] += 1
        if state is _S.DROPPED:
            del self._states[seq]
        else:
            self._states[seq] = state

    # ------------------------------------------------------------ the whole

    def flush(self) -> None:
        self._file.flush()

    def check(self, live: int) -> None:
        """Raise LedgerError unless the file's rows add up and ``live`` is the caller's count of live groups."""
        counts, _ = _totals(self.table, self.head)
        booked = sum(counts[state] for state in LIVE)
        total = counts[_S.CONSUMED] + counts[_S.DROPPED] + booked
        if self.head.issued != total or booked != live or counts != self.counts:
            shown = {state.name.lower(): n for state, n in counts.items()}
            raise LedgerError(
                f"{self._file.path} does not add up: {self.head.issued} issued of {self.adapter}, {shown}, "
                f"{live} groups held"
            )


def _totals(table: GroupTable, head: Head) -> tuple[Counter[GroupState], Counter[str]]:
    """Groups by state and dropped groups by reason, folded ones included."""
    counts, reasons = Counter[GroupState](), Counter(head.folded_dropped)
    counts[_S.CONSUMED] += head.folded_consumed
    counts[_S.DROPPED] += sum(head.folded_dropped.values())
    for state, reason, n in table.totals():
        counts[state] += n
        if state is _S.DROPPED:
            reasons[reason] += n
    return counts, reasons


def _fold(table: GroupTable, head: Head, before: int) -> None:
    """Replace rows that were closed at steps before ``before`` by their counts in ``head``."""
    folded = Counter(head.folded_dropped)
    for state, reason, n in table.take_closed(before):
        if state is _S.DROPPED:
            folded[reason] += n
        else:
            head.folded_consumed += n
    head.folded_dropped, head.known_from = dict(folded), before


def take_snapshot(ledger: Ledger, version: int) -> bytes:
    """The ledger once every step before ``version`` is consumed, for :func:`rebuild`."""
    live = ledger.table.rows(*LIVE)
    still_open = [row for row in live if row.state is not GroupState.LEASED or row.step >= version]
    return msgspec.msgpack.encode(
        LedgerSnapshot(
            adapter=ledger.adapter,
            order=ledger.head.order,
            version=version,
            next_position=ledger.head.next_position,
            issued=ledger.head.issued,
            consumed=ledger.counts[GroupState.CONSUMED] + len(live) - len(still_open),
            dropped=dict(ledger.drop_reasons),
            open=[OpenGroup(r.seq, r.position, r.issue, r.stale, r.failed, r.resampled) for r in still_open],
        )
    )


def decode_snapshot(data: bytes, adapter: str) -> LedgerSnapshot | None:
    """None for no bytes. Raises RolloutError for bytes that are no snapshot of ``adapter``."""
    if not data:
        return None
    try:
        snapshot = msgspec.msgpack.decode(data, type=LedgerSnapshot)
    except msgspec.DecodeError as error:
        raise RolloutError(f"the checkpoint's ledger snapshot of {adapter} cannot be read: {error}") from None
    if (snapshot.format, snapshot.adapter) != (SCHEMA_VERSION, adapter):
        raise RolloutError(
            f"the checkpoint's ledger snapshot is of {snapshot.adapter!r} in format {snapshot.format}, "
            f"not of {adapter!r} in format {SCHEMA_VERSION}"
        )
    return snapshot


def rebuild(ledger: Ledger, snapshot: LedgerSnapshot | None) -> None:
    """Delete all rows and restore ``snapshot`` (None: nothing issued); its open groups are issued."""
    head = Head(order=ledger.head.order, counters=ledger.head.counters)
    if snapshot is not None:
        head.issued, head.next_position = snapshot.issued, snapshot.next_position
        head.next_version = head.known_from = snapshot.version
        head.folded_consumed, head.folded_dropped = snapshot.consumed, dict(snapshot.dropped)
    ledger.reset(head, snapshot.open if snapshot is not None else ())

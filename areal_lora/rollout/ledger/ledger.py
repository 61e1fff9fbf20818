"""The run ledger: what became of every issued group, in one SQLite file of the run (contract C8).

    issued -> running -> done -> leased(step) -> consumed(step)
       ^________| retry    ^________|  rolled back      every state but consumed may become dropped(reason)

A row is one issue of one prompt; ``(position, issue)`` is unique and identifies a request. At all times
``issued = consumed + dropped + live``. A rollback turns consumed rows into dropped ones; a prompt that is issued
again after a drop gets a new row.

Writes collect in one transaction until :meth:`Ledger.flush`. A controller that dies before loses them, which is
harmless while no other process has seen them: see `controller/pool`.

Reconcile an adapter's ledger with the version that a trainer has loaded (contract C9).

The newest valid checkpoint decides what was consumed. :func:`plan` is pure; :func:`apply` writes.

    row                            step < version   step >= version
    leased                         consumed         done again
    consumed                       consumed         rolled_back, issued again (trajectories are deleted)
    done, leased, running with
    versions > version                              rolled_back, issued again
    issued, other running, done                     continue
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from areal_lora.errors import ConfigError, RolloutError
from areal_lora.rollout.ledger.file import LIVE, SCHEMA_VERSION, GroupState, Head, LedgerError, LedgerFile, LedgerRow

_S = GroupState
Totals: TypeAlias = list[tuple[GroupState, str, int]]
"""State, reason and number of rows, for each state and reason."""


class OpenGroup(msgspec.Struct, array_like=True, frozen=True):
    """A live group of a snapshot: its trajectories, if any, are not in it."""

    seq: int
    position: int
    issue: int
    stale: int
    failed: int
    resampled: int


class LedgerSnapshot(msgspec.Struct, kw_only=True, frozen=True):
    """An adapter's ledger once the steps before ``version`` are consumed; travels in the checkpoint."""

    format: int = SCHEMA_VERSION
    adapter: str
    order: str
    version: int
    next_position: int
    issued: int
    consumed: int
    dropped: dict[str, int]
    open: list[OpenGroup]


def totals(execute: Callable[..., sqlite3.Cursor], adapter: str, condition: str = "", *arguments: int) -> Totals:
    found = execute(
        f"SELECT state, reason, COUNT(*) FROM groups WHERE adapter = ? {condition} GROUP BY state, reason",
        (adapter, *arguments),
    )
    return [(GroupState(state), reason, n) for state, reason, n in found]


def counted(
    execute: Callable[..., sqlite3.Cursor], adapter: str, head: Head
) -> tuple[Counter[GroupState], Counter[str]]:
    """Groups by state and dropped groups by reason, folded ones included."""
    reasons = Counter(head.folded_dropped)
    counts = Counter({_S.CONSUMED: head.folded_consumed, _S.DROPPED: reasons.total()})
    for state, reason, n in totals(execute, adapter):
        counts[state] += n
        if state is _S.DROPPED:
            reasons[reason] += n
    return counts, reasons


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
        names = LedgerRow.__struct_fields__
        found = self._file.execute(
            f"SELECT {', '.join(names)} FROM groups WHERE adapter = ? AND state IN ({marks}) ORDER BY seq",
            (self._adapter,),
        )
        return [msgspec.convert(dict(zip(names, values, strict=True)), LedgerRow) for values in found]

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

    def take_closed(self, before: int) -> Totals:
        """Delete the rows that were closed at steps before ``before``, and return their totals."""
        closed = "AND state >= 4 AND step < ?"
        found = totals(self._file.execute, self._adapter, closed, before)
        self._file.execute(f"DELETE FROM groups WHERE adapter = ? {closed}", (self._adapter, before))
        return found

    def clear(self) -> None:
        for table in ("groups", "trajectories"):
            self._file.execute(f"DELETE FROM {table} WHERE adapter = ?", (self._adapter,))


KEEP_STEPS = 64  # steps whose closed rows are kept, for a trainer that falls back so far
FOLD_EVERY = 16  # committed steps


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
        self.counts, self.drop_reasons = counted(self._file.execute, self.adapter, self.head)
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
        self._file.execute("INSERT INTO trajectories VALUES (?, ?, ?)", (self.adapter, seq, payload))

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
        before = step + 1 - KEEP_STEPS
        if before - self.head.known_from < FOLD_EVERY:
            return
        folded = Counter(self.head.folded_dropped)  # rows closed at steps before ``before`` become counts in the head
        for state, reason, n in self.table.take_closed(before):
            if state is _S.DROPPED:
                folded[reason] += n
            else:
                self.head.folded_consumed += n
        self.head.folded_dropped, self.head.known_from = dict(folded), before

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
        counts, _ = counted(self._file.execute, self.adapter, self.head)
        booked = sum(counts[state] for state in LIVE)
        total = counts[_S.CONSUMED] + counts[_S.DROPPED] + booked
        if self.head.issued != total or booked != live or counts != self.counts:
            shown = {state.name.lower(): n for state, n in counts.items()}
            raise LedgerError(
                f"{self._file.path} does not add up: {self.head.issued} issued of {self.adapter}, {shown}, "
                f"{live} groups held"
            )


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


ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """Rows by what happens to them. ``rebuild`` is the reason to rebuild from the snapshot, if any."""

    version: int
    rebuild: str = ""
    consumed: tuple[LedgerRow, ...] = ()  # leased before: their commit did not arrive
    again: tuple[LedgerRow, ...] = ()  # done again, with the trajectories they have
    reissued: tuple[LedgerRow, ...] = ()  # rolled back and issued again
    continuing: tuple[LedgerRow, ...] = ()

    def __str__(self) -> str:
        if self.rebuild:
            return f"rebuilt from the checkpoint's snapshot, because {self.rebuild}"
        ready = sum(row.state is GroupState.DONE for row in self.continuing)
        return (
            f"{len(self.consumed)} groups committed late, {len(self.again) + ready} ready with the trajectories "
            f"they have, {len(self.continuing) - ready} sampled on or again, {len(self.reissued)} rolled back and "
            "issued again"
        )


def plan(
    head: Head, rows: Sequence[LedgerRow], version: int, snapshot: LedgerSnapshot | None, *, known: bool = True
) -> Reconciliation:
    """Raises RolloutError where neither the ledger nor a snapshot states what was consumed before ``version``.

    ``rows`` are the live and the consumed ones; ``known``: the ledger file had this adapter before.
    """
    rebuild = ""
    if not known and version > 0:
        rebuild = "the ledger file has nothing of this adapter"
    elif head.next_version < version:
        rebuild = f"the ledger ends before step {head.next_version} and the checkpoint is of version {version}"
    elif version < head.known_from:
        rebuild = f"the ledger has forgotten the groups of steps before {head.known_from}"
    if rebuild:
        _check_snapshot(head, version, snapshot, rebuild)
        return Reconciliation(version=version, rebuild=rebuild)
    consumed, again, reissued, continuing = list[LedgerRow](), list[LedgerRow](), list[LedgerRow](), list[LedgerRow]()
    for row in rows:
        undone = row.step >= version and row.state in (GroupState.LEASED, GroupState.CONSUMED)
        if row.state is GroupState.CONSUMED:
            if undone:
                reissued.append(row)
        elif row.state is GroupState.LEASED and not undone:
            consumed.append(row)
        elif max(row.version, row.newest) > version and row.state is not GroupState.ISSUED:
            reissued.append(row)
        else:
            (again if undone else continuing).append(row)
    return Reconciliation(
        version=version,
        consumed=tuple(consumed),
        again=tuple(again),
        reissued=tuple(reissued),
        continuing=tuple(continuing),
    )


def _check_snapshot(head: Head, version: int, snapshot: LedgerSnapshot | None, rebuild: str) -> None:
    if version == 0 and snapshot is None:
        return
    if snapshot is None:
        raise RolloutError(
            f"version {version} cannot be resumed: {rebuild}, and its checkpoint carries no ledger snapshot "
            "(fix: resume from another checkpoint, or start a new run with --fresh)"
        )
    if (snapshot.version, snapshot.order) != (version, head.order):
        raise RolloutError(
            f"the ledger snapshot with version {version} is of version {snapshot.version} or of other prompts "
            "(fix: start with the task and run.seed of this run)"
        )


def apply(ledger: Ledger, made: Reconciliation, snapshot: LedgerSnapshot | None) -> None:
    """Carry out ``made``. Nothing is durable before the ledger is flushed."""
    ledger.known = True
    if made.rebuild:
        rebuild(ledger, snapshot)
        return
    ledger.head.next_version = made.version
    ledger.consume(made.version - 1)
    ledger.unlease(row.seq for row in made.again)
    for row in made.reissued:
        if row.state is GroupState.CONSUMED:
            ledger.undo(row.seq, ROLLED_BACK)
        else:
            ledger.drop(row.seq, ROLLED_BACK)
        ledger.issue(row.position, row.issue + 1, row.stale)


def plan_for(ledger: Ledger, version: int, snapshot: LedgerSnapshot | None) -> Reconciliation:
    rows = ledger.table.rows(*LIVE, GroupState.CONSUMED)
    return plan(ledger.head, rows, version, snapshot, known=ledger.known)

"""The rows of one adapter in the ledger file: SQL, and nothing that judges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal_lora.rollout.ledger.file import LedgerError, LedgerFile
from areal_lora.rollout.ledger.ledger_records import GroupState, LedgerRow, OpenGroup

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

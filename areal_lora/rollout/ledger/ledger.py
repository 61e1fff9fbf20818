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
from collections.abc import Iterable, Sequence
from typing import Any

from areal_lora.errors import ConfigError
from areal_lora.rollout.ledger.file import LedgerError, LedgerFile
from areal_lora.rollout.ledger.ledger_records import LIVE, GroupState, Head, OpenGroup
from areal_lora.rollout.ledger.table import GroupTable

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

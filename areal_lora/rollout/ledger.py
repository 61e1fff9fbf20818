"""What became of every issued group of one adapter: the book behind exactly-once (contract C8).

    issued -> running -> done -> leased -> consumed
       ^________|  (retry)          every state left of consumed may become dropped(reason)

A row is one issue of one ``(epoch, prompt)``; a prompt that is issued again gets a new row. At
all times ``issued rows = consumed + dropped + live``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from areal_lora.errors import RolloutError


class GroupState(StrEnum):
    ISSUED = "issued"
    RUNNING = "running"
    DONE = "done"
    LEASED = "leased"
    CONSUMED = "consumed"
    DROPPED = "dropped"


LIVE = (GroupState.ISSUED, GroupState.RUNNING, GroupState.DONE, GroupState.LEASED)

_ALLOWED: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.ISSUED: frozenset({GroupState.RUNNING, GroupState.DROPPED}),
    GroupState.RUNNING: frozenset({GroupState.ISSUED, GroupState.DONE, GroupState.DROPPED}),
    GroupState.DONE: frozenset({GroupState.LEASED, GroupState.DROPPED}),
    GroupState.LEASED: frozenset({GroupState.DONE, GroupState.CONSUMED, GroupState.DROPPED}),
    GroupState.CONSUMED: frozenset(),
    GroupState.DROPPED: frozenset(),
}


@dataclass(slots=True, kw_only=True)
class LedgerRow:
    """``seq`` numbers the issues of an adapter, ``position`` the prompt stream."""

    seq: int
    uid: str
    position: int
    state: GroupState = GroupState.ISSUED
    version: int = -1
    step: int = -1
    reason: str = ""


class Ledger(Protocol):
    """The book of one adapter. Methods raise RolloutError for a move the diagram does not show."""

    def issue(self, uid: str, position: int) -> int:
        """Open a row and return its ``seq``; refuses a uid that is live or already consumed."""
        ...

    def run(self, seq: int, version: int) -> None: ...
    def requeue(self, seq: int) -> None: ...
    def finish(self, seq: int) -> None: ...
    def lease(self, seq: int, step: int) -> None: ...
    def unlease(self, seq: int) -> None: ...
    def consume(self, seq: int) -> None: ...
    def drop(self, seq: int, reason: str) -> None: ...
    def counts(self) -> Mapping[GroupState, int]: ...
    def drop_reasons(self) -> Mapping[str, int]: ...
    def check(self, live: int) -> None:
        """Raise RolloutError unless issued = consumed + dropped + live and ``live`` is the caller's count."""
        ...


class MemoryLedger:
    """A ledger that lives as long as the controller."""

    def __init__(self) -> None:
        self.rows: list[LedgerRow] = []
        self._counts: Counter[GroupState] = Counter()
        self._reasons: Counter[str] = Counter()
        self._open: set[str] = set()

    def issue(self, uid: str, position: int) -> int:
        if uid in self._open:
            raise RolloutError(f"group {uid} is live or consumed already and cannot be issued again")
        self._open.add(uid)
        self.rows.append(LedgerRow(seq=len(self.rows), uid=uid, position=position))
        self._counts[GroupState.ISSUED] += 1
        return len(self.rows) - 1

    def run(self, seq: int, version: int) -> None:
        self._move(seq, GroupState.RUNNING).version = version

    def requeue(self, seq: int) -> None:
        self._move(seq, GroupState.ISSUED)

    def finish(self, seq: int) -> None:
        self._move(seq, GroupState.DONE)

    def lease(self, seq: int, step: int) -> None:
        self._move(seq, GroupState.LEASED).step = step

    def unlease(self, seq: int) -> None:
        self._move(seq, GroupState.DONE)

    def consume(self, seq: int) -> None:
        self._move(seq, GroupState.CONSUMED)

    def drop(self, seq: int, reason: str) -> None:
        row = self._move(seq, GroupState.DROPPED)
        row.reason = reason
        self._reasons[reason] += 1
        self._open.discard(row.uid)

    def counts(self) -> Mapping[GroupState, int]:
        return self._counts

    def drop_reasons(self) -> Mapping[str, int]:
        return self._reasons

    def check(self, live: int) -> None:
        booked = sum(self._counts[state] for state in LIVE)
        closed = self._counts[GroupState.CONSUMED] + self._counts[GroupState.DROPPED]
        if len(self.rows) != closed + booked or booked != live:
            raise RolloutError(
                f"ledger does not add up: {len(self.rows)} issued, {dict(self._counts)}, {live} groups held"
            )

    def _move(self, seq: int, state: GroupState) -> LedgerRow:
        row = self.rows[seq]
        if state not in _ALLOWED[row.state]:
            raise RolloutError(f"group {row.uid} (issue {seq}) cannot go from {row.state} to {state}")
        self._counts[row.state] -= 1
        self._counts[state] += 1
        row.state = state
        return row

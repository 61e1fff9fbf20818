"""Records of the run ledger: a group's row, an adapter's head, the snapshot in a checkpoint."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from areal_lora.rollout.ledger.ledger_schema import SCHEMA_VERSION


class GroupState(IntEnum):
    ISSUED = 0
    RUNNING = 1
    DONE = 2
    LEASED = 3
    CONSUMED = 4
    DROPPED = 5


LIVE = (GroupState.ISSUED, GroupState.RUNNING, GroupState.DONE, GroupState.LEASED)


class LedgerRow(msgspec.Struct, kw_only=True, frozen=True):
    seq: int
    position: int
    issue: int
    stale: int
    state: GroupState
    failed: int
    resampled: int
    version: int
    newest: int
    step: int


class LedgerCounters(msgspec.Struct):
    """Figures that rows do not hold, as of the last flush."""

    tokens: int = 0
    late: int = 0
    idle_s: float = 0.0
    generation_s: float = 0.0
    retried: dict[str, int] = msgspec.field(default_factory=dict)
    staleness: dict[int, int] = msgspec.field(default_factory=dict)


class Head(msgspec.Struct, kw_only=True):
    """State of an adapter beside its rows. ``known_from``: steps before it have no rows any more."""

    order: str  # digest of the prompt stream
    trainer: str = ""
    issued: int = 0
    next_position: int = 0
    next_version: int = 0
    known_from: int = 0
    folded_consumed: int = 0
    folded_dropped: dict[str, int] = msgspec.field(default_factory=dict)
    counters: LedgerCounters = msgspec.field(default_factory=LedgerCounters)


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

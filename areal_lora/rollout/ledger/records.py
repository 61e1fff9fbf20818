"""What the run ledger speaks of: a group's row, an adapter's head, the snapshot in a checkpoint."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from areal_lora.errors import RolloutError

SCHEMA_VERSION = 1


class GroupState(IntEnum):
    ISSUED = 0
    RUNNING = 1
    DONE = 2
    LEASED = 3
    CONSUMED = 4
    DROPPED = 5


LIVE = (GroupState.ISSUED, GroupState.RUNNING, GroupState.DONE, GroupState.LEASED)


class Row(msgspec.Struct, kw_only=True, frozen=True):
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


class Counters(msgspec.Struct):
    """What is counted beside the rows, as of the last flush."""

    tokens: int = 0
    late: int = 0
    idle_s: float = 0.0
    generation_s: float = 0.0
    retried: dict[str, int] = msgspec.field(default_factory=dict)
    staleness: dict[int, int] = msgspec.field(default_factory=dict)


class Head(msgspec.Struct, kw_only=True):
    """What an adapter's rows do not say themselves. ``known_from``: steps before it have no rows any more."""

    order: str  # digest of the prompt stream
    trainer: str = ""
    issued: int = 0
    next_position: int = 0
    next_version: int = 0
    known_from: int = 0
    folded_consumed: int = 0
    folded_dropped: dict[str, int] = msgspec.field(default_factory=dict)
    counters: Counters = msgspec.field(default_factory=Counters)


class OpenGroup(msgspec.Struct, array_like=True, frozen=True):
    """A live group of a snapshot: its trajectories, if any, are not in it."""

    seq: int
    position: int
    issue: int
    stale: int
    failed: int
    resampled: int


class Snapshot(msgspec.Struct, kw_only=True, frozen=True):
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


def decode_snapshot(data: bytes, adapter: str) -> Snapshot | None:
    """None for no bytes. Raises RolloutError for bytes that are no snapshot of ``adapter``."""
    if not data:
        return None
    try:
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except msgspec.DecodeError as error:
        raise RolloutError(f"the checkpoint's ledger snapshot of {adapter} cannot be read: {error}") from None
    if (snapshot.format, snapshot.adapter) != (SCHEMA_VERSION, adapter):
        raise RolloutError(
            f"the checkpoint's ledger snapshot is of {snapshot.adapter!r} in format {snapshot.format}, "
            f"not of {adapter!r} in format {SCHEMA_VERSION}"
        )
    return snapshot

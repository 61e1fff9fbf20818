"""The ledger snapshot that travels in a checkpoint: made, read, and a ledger rebuilt from it."""

from __future__ import annotations

import msgspec

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger.ledger import Ledger
from areal_lora.rollout.ledger.ledger_records import LIVE, GroupState, Head, LedgerSnapshot, OpenGroup
from areal_lora.rollout.ledger.ledger_schema import SCHEMA_VERSION


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

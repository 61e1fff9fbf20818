"""Getting one batch to every trainer rank: rank 0 asks the controller, the others receive."""

from __future__ import annotations

import msgspec

from areal_lora.types import TrajectoryGroup
from areal_lora.weight_sync.exchange import Exchange

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrajectoryGroup] | None).decode


def share_groups(groups: list[TrajectoryGroup] | None, exchange: Exchange) -> list[TrajectoryGroup] | None:
    """What rank 0 passes, on every rank: the groups, or None if there is something else to do first."""
    return _decode(exchange.broadcast_bytes(_encode(groups) if exchange.rank == 0 else None))

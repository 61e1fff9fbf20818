"""Getting one batch to every trainer rank: rank 0 asks the controller, the others receive."""

from __future__ import annotations

import msgspec

from areal_lora.types import TrajectoryGroup
from areal_lora.weight_sync.exchange import Exchange

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrajectoryGroup]).decode


def share_groups(groups: list[TrajectoryGroup] | None, exchange: Exchange) -> list[TrajectoryGroup]:
    """Rank 0 passes the groups, the others None; all return equal groups."""
    return _decode(exchange.all_gather_bytes(b"" if groups is None else _encode(groups))[0])

"""Getting one batch to every trainer rank: rank 0 asks the controller, the others receive."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from areal_lora.types import TrajectoryGroup

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrajectoryGroup]).decode


def broadcast_bytes(payload: bytes | None, group: dist.ProcessGroup) -> bytes:
    """Send ``payload`` from rank 0 (the others pass None) and return it on every rank."""
    size = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    if payload is None:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    else:
        buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    dist.broadcast(buffer, 0, group=group)
    return buffer.numpy().tobytes()


def share_groups(groups: list[TrajectoryGroup] | None, group: dist.ProcessGroup) -> list[TrajectoryGroup]:
    """Rank 0 passes the groups, the others None; all return equal groups."""
    return _decode(broadcast_bytes(None if groups is None else _encode(groups), group))

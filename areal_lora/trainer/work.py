"""What the trainer does next. Rank 0 decides, and the other ranks receive the decision."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from areal_lora.distributed.exchange import Exchange
from areal_lora.types import TrajectoryGroup


class TrainOn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A batch of ``adapter`` is there."""

    adapter: str
    groups: list[TrajectoryGroup]


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``adapter`` has made its last step, and all its evaluations have an answer."""

    adapter: str


class Faulted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rollouts of ``adapter`` have failed."""

    adapter: str
    reason: str


class Unpublished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The newest version of ``adapter`` could not be published. Without it there may be no further batch."""

    adapter: str


class ServersChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Servers joined that hold no version yet, or do not answer."""


Work: TypeAlias = TrainOn | Drained | Faulted | Unpublished | ServersChanged

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Work).decode


def share(work: Work | None, exchange: Exchange) -> Work:
    """Rank 0's decision on every rank; the other ranks pass None. Collective."""
    decided: Work = _decode(exchange.broadcast_bytes(_encode(work) if exchange.rank == 0 else None))
    return decided

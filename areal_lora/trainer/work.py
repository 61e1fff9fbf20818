"""What the trainer does next. Rank 0 decides, and the other ranks receive the decision."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from areal_lora.distributed.exchange import Exchange
from areal_lora.operations.messages import Failed, Operation
from areal_lora.trainer.adapter import TokenRows
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


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No adapter remains, and none will come."""


class ServersChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Servers joined that hold no version yet, or do not answer."""


class Joins(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``adapter`` comes: its settings as JSON, the sequences of its probe, the folder of its checkpoint or nothing."""

    adapter: str
    config: bytes
    probe: TokenRows
    checkpoint: str


class Leaves(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``adapter`` is to be deleted."""

    adapter: str


class Pauses(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``adapter`` takes no further steps, or again takes some."""

    adapter: str
    paused: bool


class Operates(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The client of ``adapter`` asks for ``operation``; ``refused`` is its outcome if it cannot be carried out."""

    adapter: str
    operation: Operation
    refused: Failed | None = None


class Concludes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A ``publish`` of the client's ``adapter``, or else its checkpoint or saved state, has ended."""

    adapter: str
    publish: bool


Roll: TypeAlias = Joins | Leaves | Pauses
"""Which adapters there are changes."""
Work: TypeAlias = TrainOn | Drained | Faulted | Unpublished | ServersChanged | Operates | Concludes | Roll | Ended

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Work).decode


def share(work: Work | None, exchange: Exchange) -> Work:
    """Rank 0's decision on every rank; the other ranks pass None. Collective."""
    decided: Work = _decode(exchange.broadcast_bytes(_encode(work) if exchange.rank == 0 else None))
    return decided

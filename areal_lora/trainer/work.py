"""What the trainer does next. Rank 0 decides, and the other ranks receive the decision."""

import time
from typing import TypeAlias

import msgspec
import numpy as np

from areal_lora.data.packed_groups import PackedGroups
from areal_lora.distributed.store import Exchange
from areal_lora.errors import ExitCode
from areal_lora.operations.protocol import Operation, OperationFailure
from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.trainer.adapter import TokenRows


class OfAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What concerns one ``adapter``."""

    adapter: str


class TrainOn(OfAdapter, frozen=True, kw_only=True, tag=True):
    """A batch of ``adapter`` is there."""

    batch: PackedGroups


class Finish(OfAdapter, frozen=True, kw_only=True, tag=True):
    """``adapter`` has made its last step, and all its evaluations have an answer."""


class RolloutFault(OfAdapter, frozen=True, kw_only=True, tag=True):
    """The rollouts of ``adapter`` have failed with an error of ``exit_code``."""

    reason: str
    exit_code: int = ExitCode.TEMPORARY


class PublishFault(OfAdapter, frozen=True, kw_only=True, tag=True):
    """The newest version of ``adapter`` could not be published. Without it there may be no further batch."""


class EndRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No adapter remains, and none will come."""


class CatchUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Servers joined that hold no version yet, or do not answer."""


class Join(OfAdapter, frozen=True, kw_only=True, tag=True):
    """``adapter`` joins. Rank 0 adds its settings as JSON, the sequences of its probe, the folder of its checkpoint (or
    nothing) before the other ranks see it.
    """

    config: bytes = b""
    probe: TokenRows = []
    checkpoint: str = ""


class SetPhase(OfAdapter, frozen=True, kw_only=True, tag=True):
    """``adapter`` takes steps again, takes no further ones until it resumes, or is to be deleted."""

    phase: DesiredPhase


class Operate(OfAdapter, frozen=True, kw_only=True, tag=True):
    """``operation``, no pass, of the client of ``adapter``; ``refused`` is its outcome if it cannot be carried out."""

    operation: Operation
    refused: OperationFailure | None = None


class JointPass(OfAdapter, frozen=True, kw_only=True, tag=True):
    """``operations`` are passes of different adapters that are computed together, that of ``adapter`` first."""

    operations: tuple[Operation, ...]


class Conclude(OfAdapter, frozen=True, kw_only=True, tag=True):
    """A ``publish`` of the client's ``adapter``, or else its checkpoint or saved state, has ended."""

    publish: bool


class CopyState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copies of a client's state are missing, and no client has an operation."""


class Idle(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 has no work yet, see `Waiting`."""


AdapterChange: TypeAlias = Join | SetPhase
"""A step from the adapters that a run has towards those that it is to have (`joining`)."""
Operations: TypeAlias = Operate | JointPass | Conclude | CopyState
"""What clients' operations make of the next turn."""
Work: TypeAlias = TrainOn | Finish | RolloutFault | PublishFault | CatchUp | Operations | AdapterChange | EndRun

IDLE_S = 60.0
"""Between two signals of rank 0 that waits for work: far below the time-out of the ranks that wait for it."""

_encode = msgspec.msgpack.Encoder(enc_hook=lambda array: len(array) if array.ndim == 2 else None).encode
_decode = msgspec.msgpack.Decoder(Work | Idle, dec_hook=lambda kind, n: np.empty((n, 0), np.int32)).decode
"""Without a batch's columns and routes, the only arrays in a message: each rank receives its own."""


def share(work: Work | None, exchange: Exchange) -> Work:
    """Rank 0's decision on every rank; the other ranks pass None. Collective."""
    while True:
        shared = exchange.broadcast_bytes(_encode(work) if exchange.rank == 0 else None)
        decided: Work | Idle = work or _decode(shared)
        if not isinstance(decided, Idle):
            return decided


class Waiting:
    """Rank 0's wait for work. Each signal renews the time-out of the other ranks, which wait in `share`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._due_s = exchange, time.monotonic() + IDLE_S

    def signal(self) -> None:
        """Send `Idle` if it is due. On rank 0, outside of any other collective."""
        if time.monotonic() >= self._due_s:
            self._exchange.broadcast_bytes(_encode(Idle()))
            self._due_s = time.monotonic() + IDLE_S

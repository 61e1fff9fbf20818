"""The points where the loop waits: batches, publishes, checkpoints, evaluations, audits. Collective over the ranks.

Rank 0 asks the controller. The other ranks wait for rank 0 in the control exchange, which has the longest time-out.
"""

from __future__ import annotations

import msgspec

from areal_lora.data.collate import assert_staleness, collate
from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import AlignmentError
from areal_lora.trainer.adapter import ControllerState, TrainingState
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.state import Trainer
from areal_lora.types import TrainBatch, TrajectoryGroup

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[list[TrajectoryGroup] | None] = msgspec.msgpack.Decoder(list[TrajectoryGroup] | None)


def catch_up(trainer: Trainer) -> None:
    """Send the newest versions to servers that joined, and exclude servers that do not answer.

    Runs while rank 0 waits for the controller, which may need these servers for the next batch or evaluation.
    """
    for state in trainer.states.values():
        join_publish(trainer, state)
        trainer.publishing.catch_up(state.name)


def controller_state(trainer: Trainer, state: TrainingState) -> ControllerState:
    """Return the adapter's controller state on rank 0, an empty one elsewhere. Not collective."""
    return trainer.rank_0.controller.state(state.name) if trainer.rank_0 else ControllerState()


def evaluated(trainer: Trainer, state: TrainingState) -> bool:
    """Wait until every evaluation of the adapter has an answer; False if the servers changed before."""
    changed = trainer.publishing.changed
    done = trainer.rank_0.controller.wait_evals(state.name, changed) if trainer.rank_0 else True
    return bool(trainer.control.broadcast_bytes(bytes([done]) if trainer.control.rank == 0 else None)[0])


def join_checkpoint(trainer: Trainer, state: TrainingState) -> None:
    saved = trainer.checkpointing.join(state.name)
    if trainer.rank_0 and saved is not None:
        trainer.rank_0.recorder.checkpointed(saved)
    wait_for_rank_0(trainer)


def join_publish(trainer: Trainer, state: TrainingState) -> None:
    trainer.publishing.join(state.name)
    wait_for_rank_0(trainer)


def wait_for_rank_0(trainer: Trainer) -> None:
    """Wait for rank 0, which may have waited for the controller longer than other collectives allow."""
    trainer.control.broadcast_bytes(b"" if trainer.control.rank == 0 else None)


def begin_audit(trainer: Trainer, state: TrainingState, batch: TrainBatch) -> None:
    """Start the audit of the batch on rank 0. Not collective."""
    if trainer.rank_0:
        temperature = state.adapter.config.sampling.temperature
        trainer.rank_0.auditor.begin(state.name, batch, state.version, temperature)


def collect_audit(trainer: Trainer, *, wait: bool = False) -> Audit | None:
    """Return the finished audits on rank 0, None elsewhere; they are of this batch or the previous one.

    Raises:
        AlignmentError: a server's scores contradict the batch; on every rank.
    """
    audit = trainer.rank_0.auditor.collect(wait=wait) if trainer.rank_0 else None
    error = trainer.control.broadcast_bytes(
        (audit.error if audit else "").encode() if trainer.control.rank == 0 else None
    ).decode()
    if error:
        raise AlignmentError(error)
    return audit


def next_batch(trainer: Trainer, state: TrainingState) -> tuple[TrainBatch, dict[int, int]]:
    """Return the batch of the next step on every rank, and its staleness histogram in tokens.

    Raises:
        StalenessError: a token is older than ``max_staleness`` (contract C7).
    """
    changed = trainer.publishing.changed
    while True:
        mine = trainer.rank_0.controller.next_groups(state.ref, changed) if trainer.rank_0 else None
        groups = share_groups(mine, trainer.control)
        if groups is not None:
            break
        catch_up(trainer)
    batch = collate(groups)
    return batch, assert_staleness(batch, state.version, trainer.config.rollout.max_staleness)


def share_groups(groups: list[TrajectoryGroup] | None, exchange: Exchange) -> list[TrajectoryGroup] | None:
    """Broadcast rank 0's groups. None: servers joined or do not answer, so call `catch_up` first."""
    return _decoder.decode(exchange.broadcast_bytes(_encode(groups) if exchange.rank == 0 else None))

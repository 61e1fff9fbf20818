"""The points where the loop waits: publishes, checkpoints, evaluations, audits. Collective over the ranks.

The other ranks wait for rank 0 in the control exchange, which has the longest time-out.
"""

from __future__ import annotations

import time

from areal_lora.checkpoint.saver import CheckpointSave
from areal_lora.data.collate import assert_staleness, collate
from areal_lora.errors import AlignmentError
from areal_lora.trainer.adapter import ControllerState, TrainingState
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.collective.fault_isolation import contained
from areal_lora.trainer.roster.roster_plan import SERVED
from areal_lora.trainer.training_state import Trainer
from areal_lora.types import TrainBatch, TrajectoryGroup

RETRY_S = 1.0
"""Before a checkpoint that could not be written is tried again."""


def catch_up(trainer: Trainer) -> None:
    """Send the newest versions to servers that joined, and exclude servers that do not answer.

    Runs while rank 0 waits for the controller, which may need these servers for the next batch or evaluation. An
    adapter whose version is refused there ends; the others are sent.
    """
    for state in trainer.states.values():
        if state.phase in SERVED:
            with contained(trainer, state):
                join_publish(trainer, state)
                trainer.publishing.catch_up(state.name)


def controller_state(trainer: Trainer, state: TrainingState) -> ControllerState:
    """Return the adapter's controller state on rank 0, an empty one elsewhere. Not collective."""
    return trainer.rank_0.driver(state.adapter).state(state.name) if trainer.rank_0 else ControllerState()


def join_checkpoint(trainer: Trainer, state: TrainingState) -> CheckpointSave | None:
    saved = trainer.checkpointing.join(state.name)
    if trainer.rank_0 and saved is not None and not saved.label:
        trainer.rank_0.recorder.checkpointed(saved)
    wait_for_rank_0(trainer)
    return saved


def make_durable(trainer: Trainer, state: TrainingState) -> None:
    """Write the checkpoint of the newest version, if it is due and has none, until it is durable. Collective.

    Raises CheckpointError on every rank when the disk takes none in several tries, see `Saver.join`.
    """
    while (save := trainer.checkpointing.save(state, controller_state(trainer, state))) is not None:
        join_checkpoint(trainer, state)
        if save.failed:
            time.sleep(RETRY_S)


def join_publish(trainer: Trainer, state: TrainingState) -> None:
    trainer.publishing.join(state.name)
    wait_for_rank_0(trainer)


def join_last(trainer: Trainer, state: TrainingState) -> None:
    """Wait for what is in progress of an adapter that takes no further step. Collective."""
    collect_audit(trainer, state, wait=True)
    join_checkpoint(trainer, state)
    join_publish(trainer, state)


def wait_for_rank_0(trainer: Trainer) -> None:
    """Wait for rank 0, which may have waited for the controller longer than other collectives allow."""
    trainer.control.broadcast_bytes(b"" if trainer.control.rank == 0 else None)


def start_audit(trainer: Trainer, state: TrainingState, batch: TrainBatch) -> None:
    """Start the audit of the batch on rank 0. Not collective."""
    if trainer.rank_0:
        temperature = state.adapter.config.sampling.temperature
        trainer.rank_0.auditor.start(state.name, batch, state.version, temperature)


def collect_audit(trainer: Trainer, state: TrainingState, *, wait: bool = False) -> Audit | None:
    """Return the adapter's finished audits on rank 0, None elsewhere; they are of this batch or the previous one.

    Raises:
        AlignmentError: a server's scores contradict the batch; on every rank.
    """
    audit = trainer.rank_0.auditor.collect(state.name, wait=wait) if trainer.rank_0 else None
    error = trainer.control.broadcast_bytes(
        (audit.error if audit else "").encode() if trainer.control.rank == 0 else None
    ).decode()
    if error:
        raise AlignmentError(error)
    return audit


def batch_of(state: TrainingState, groups: list[TrajectoryGroup]) -> tuple[TrainBatch, dict[int, int]]:
    """The batch of the next step, and its staleness histogram in tokens.

    Raises:
        StalenessError: a token is older than ``max_staleness`` (contract C7).
    """
    batch = collate(groups)
    return batch, assert_staleness(batch, state.version, state.adapter.run.max_staleness)

"""Carry out a client's operation on every rank, with the verbs that a training step uses::

    Pass                  gradients are added, log-probabilities are the answer
    OptimStep, LoadState  the weights change -> checkpoint with the number of the operation -> answer
    SaveState             a folder beside the checkpoints
    Publish               the newest version is active on the servers -> answer

All of one operation happens before the next one of any adapter begins. What is wrong with an operation fails it, what
is wrong with the adapter ends the adapter (`containment`).
"""

from __future__ import annotations

from areal_lora.engine.base import AdamValues
from areal_lora.errors import CheckpointError
from areal_lora.operations.messages import (
    Failed,
    LoadState,
    Operation,
    OptimStep,
    Outcome,
    Pass,
    Publish,
    Published,
    SaveState,
    Stepped,
)
from areal_lora.processes.faults import reached
from areal_lora.trainer.adapter import TrainingState
from areal_lora.trainer.containment import contained
from areal_lora.trainer.passes import carry_out
from areal_lora.trainer.saved_states import load_saved
from areal_lora.trainer.state import Trainer
from areal_lora.trainer.waits import controller_state, join_checkpoint, join_publish, make_durable
from areal_lora.trainer.work import Operates


def operate(trainer: Trainer, state: TrainingState, work: Operates) -> None:
    """Carry out one operation, and answer it. Collective."""
    with contained(trainer, state):
        outcome = work.refused or _outcome(trainer, state, work.operation)
        if isinstance(work.operation.what, OptimStep | LoadState):
            trainer.engine.discard_gradients(state.name)
            _settle(trainer, state, work.operation, outcome)
        if trainer.rank_0:
            trainer.rank_0.clients_of(state.adapter).complete(work.operation, outcome)
            trainer.rank_0.turns.trained(state.name, _tokens(work.operation))
            trainer.rank_0.recorder.beat()


def _outcome(trainer: Trainer, state: TrainingState, operation: Operation) -> Outcome:
    match operation.what:
        case Pass() as asked:
            outcome: Outcome = carry_out(trainer.engine, asked, state.name)
            reached("trainer.operation.passed")
            return outcome
        case OptimStep() as step:
            return _step(trainer, state, step)
        case LoadState() as asked:
            return load_saved(trainer.engine, trainer.run_folder, asked, state.name)
        case SaveState(label=label):
            return _save(trainer, state, label)
        case Publish():
            return _publish(trainer, state)
    raise AssertionError(f"{type(operation.what).__name__} is done by rank 0 alone")


def _step(trainer: Trainer, state: TrainingState, step: OptimStep) -> Stepped:
    adam = AdamValues(
        beta1=step.beta1,
        beta2=step.beta2,
        eps=step.eps,
        weight_decay=step.weight_decay,
        max_grad_norm=step.grad_clip_norm or None,
    )
    stats = trainer.engine.optim_step(state.name, 1.0, step.lr, adam).values
    skipped = stats["skipped"] == 1.0
    return Stepped(
        step=trainer.engine.step_count(state.name), grad_norm=0.0 if skipped else stats["grad_norm"], skipped=skipped
    )


def _settle(trainer: Trainer, state: TrainingState, operation: Operation, outcome: Outcome) -> None:
    """Make the operation the adapter's version, and its checkpoint durable.

    Raises CheckpointError on every rank when the disk takes no checkpoint in several tries.
    """
    join_checkpoint(trainer, state)
    state.version = operation.number
    if trainer.rank_0:
        trainer.rank_0.clients_of(state.adapter).settle(operation, outcome)
    reached("trainer.operation.settling")
    make_durable(trainer, state)
    reached("trainer.operation.settled")


def _save(trainer: Trainer, state: TrainingState, label: str) -> Outcome:
    try:
        return trainer.checkpointing.keep(state, controller_state(trainer, state), label)
    except CheckpointError as error:
        return Failed(reason=str(error), by_client=False)


def _publish(trainer: Trainer, state: TrainingState) -> Published:
    join_publish(trainer, state)
    if trainer.publishing.newest(state.name) != state.version:
        trainer.publishing.publish(state.adapter, state.version, None)
        join_publish(trainer, state)
    return Published(version=state.version)


def _tokens(operation: Operation) -> int:
    """What a turn costs: tokens that were passed; a step is as good as none."""
    return sum(len(datum.tokens) // 4 for datum in operation.what.data) if isinstance(operation.what, Pass) else 1

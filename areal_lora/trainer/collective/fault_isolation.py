"""Errors that concern one adapter end this adapter, not the run.

Contained is only what every rank raises alike and what concerns nothing that the adapters share::

    AdapterError, ParityError      its publish was refused, or the servers serve something else
    AlignmentError, StalenessError its batch violates a contract
    NonFiniteError                 its gradients
    AdapterRolloutError            its rewards, its workflow
    CheckpointError                its checkpoints cannot be written

Everything else (servers, other ranks, controller, ledger) ends the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from areal_lora import errors
from areal_lora.processes.log import get_logger
from areal_lora.trainer import companions
from areal_lora.trainer.adapter import SERVED, Adapter, TrainingState
from areal_lora.trainer.training_state import Trainer
from areal_lora.types import AdapterPhase

CONTAINED = (
    errors.AdapterError,
    errors.ParityError,
    errors.AlignmentError,
    errors.StalenessError,
    errors.NonFiniteError,
    errors.AdapterRolloutError,
    errors.CheckpointError,
)

log = get_logger(__name__)


@contextmanager
def contained(trainer: Trainer, state: TrainingState) -> Iterator[None]:
    """A fault of the adapter inside the block ends the adapter. In a run of one adapter, and no service, it is raised.

    Collective over all ranks.
    """
    try:
        yield
    except CONTAINED as error:
        if len(trainer.states) == 1 and trainer.config.service is None:
            raise
        fail(trainer, state, error)


def fail(trainer: Trainer, state: TrainingState, error: errors.ArealLoraError) -> None:
    """End the training of an adapter; the others continue. Its newest checkpoint stays. Collective."""
    state.failure = error
    enter(trainer, state, AdapterPhase.FAILED, str(error))
    rest = [other.name for other in trainer.states.values() if other.phase in SERVED]
    others = f"{', '.join(rest)} continue" if rest else "no adapter remains"
    log.error("%s has failed at version %d: %s; %s", state.name, state.version, error, others)
    for join in (trainer.publishing.join, trainer.checkpointing.join):
        with suppress(*CONTAINED):  # the first error is the one that is reported
            join(state.name)
    leave(trainer, state)


def enter(trainer: Trainer, state: TrainingState, phase: AdapterPhase, reason: str = "") -> None:
    """Change the adapter's phase, and record it on rank 0."""
    if state.phase is phase:
        return
    state.phase = phase
    if trainer.rank_0:
        trainer.rank_0.recorder.phase(state.ref, phase, reason)


def leave(trainer: Trainer, state: TrainingState) -> None:
    """Leave the adapter's part of trainer and servers to the others, once it is done, failed or deleted.

    On every rank. Its checkpoints and its exported folder stay.
    """
    others = (other for other in trainer.states.values() if other is not state)
    if trainer.config.service is not None or any(other.phase in SERVED for other in others):
        trainer.publishing.drop(state.name)
        release(trainer, state.adapter)
    if trainer.rank_0:
        trainer.rank_0.turns.leave(state.name)
        trainer.rank_0.driver(state.adapter).end(state.name, str(state.failure or "the adapter was deleted"))


def release(trainer: Trainer, adapter: Adapter) -> None:
    """Free the adapter's weights, gradients and moments on this rank, and those of its companions."""
    for name in (adapter.name, *companions.resident(adapter).values()):
        trainer.engine.remove_adapter(name)

"""The points where the loop waits: batches, publishes, checkpoints, evaluations, audits. Collective over the ranks.

Rank 0 asks the controller. The other ranks wait for rank 0 in the control exchange, which has the longest time-out;
while rank 0 waits for work, it renews that (`work.Waiting`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from areal_lora.checkpoint.saver import Save
from areal_lora.data.collate import assert_staleness, collate
from areal_lora.errors import AlignmentError
from areal_lora.rollout.channel.client import SHORT_POLL_S
from areal_lora.trainer.adapter import ControllerState, TrainingState
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.containment import contained
from areal_lora.trainer.roster import SERVED
from areal_lora.trainer.state import Trainer
from areal_lora.trainer.underway import AGAIN_S, concluded, may_begin
from areal_lora.trainer.work import Concludes, Ended, Operates, Roll, ServersChanged, Unpublished, Waiting, Work, share
from areal_lora.types import AdapterPhase, TrainBatch, TrajectoryGroup

_LISTENING_S = 0.02
"""Of a poll of the controller, where clients wait for answers."""


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


def join_checkpoint(trainer: Trainer, state: TrainingState) -> Save | None:
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
            time.sleep(AGAIN_S)


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


def begin_audit(trainer: Trainer, state: TrainingState, batch: TrainBatch) -> None:
    """Start the audit of the batch on rank 0. Not collective."""
    if trainer.rank_0:
        temperature = state.adapter.config.sampling.temperature
        trainer.rank_0.auditor.begin(state.name, batch, state.version, temperature)


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


def next_work(trainer: Trainer, roll: Callable[[], Roll | None] = lambda: None) -> Work | None:
    """What is to be done next, the same on every rank; None once no adapter remains and none will come.

    Of several adapters whose batch is ready, the one trains whose turn it is (`turns`). Rank 0 asks ``roll`` whether
    adapters come or go, between two steps and about every second while it waits.
    """
    while True:
        work = share(_decide(trainer, roll) if trainer.rank_0 else None, trainer.control)
        if isinstance(work, Ended):
            return None
        if not isinstance(work, ServersChanged):
            return work
        catch_up(trainer)


def _decide(trainer: Trainer, roll: Callable[[], Roll | None]) -> Work:
    """Rank 0's decision."""
    assert trainer.rank_0
    if (change := roll()) is not None:
        return change
    operation = _of_clients(trainer)
    if isinstance(operation, Concludes):
        return operation
    by_phase = {phase: [s.name for s in trainer.states.values() if s.phase is phase] for phase in SERVED}
    if not any(by_phase.values()) and (trainer.rank_0.newcomers is None or trainer.rank_0.newcomers.closed):
        return Ended()
    order = trainer.rank_0.turns.order(by_phase[AdapterPhase.ACTIVE])
    if operation is not None:
        order = order[: order.index(operation.adapter)]
    wanted = [trainer.states[name].ref for name in order if not trainer.states[name].adapter.config.is_client]
    if operation is not None and not wanted:
        return operation
    interruption = partial(_interruption, trainer, roll, Waiting(trainer.control))
    driven = any(state.adapter.config.is_client for state in trainer.states.values())
    wait_s = 0.0 if operation else _LISTENING_S if driven else SHORT_POLL_S
    return trainer.rank_0.controller.next_work(wanted, by_phase[AdapterPhase.DRAINING], interruption, wait_s)


def _interruption(trainer: Trainer, roll: Callable[[], Roll | None], waiting: Waiting) -> Work | None:
    """What is to be done before the next batch, on rank 0."""
    waiting.signal()
    if (failed := trainer.publishing.failed()) is not None:
        return Unpublished(adapter=failed)
    if trainer.publishing.changed():
        return ServersChanged()
    return roll() or _of_clients(trainer)


def _of_clients(trainer: Trainer) -> Operates | Concludes | None:
    """What has ended in the background, else the operation of the client whose turn it is among them, on rank 0."""
    if trainer.rank_0 is None or trainer.rank_0.clients is None:
        return None
    if (ended := concluded(trainer)) is not None:
        return ended
    trainer.rank_0.clients.listen()
    active = (s for s in trainer.states.values() if s.phase is AdapterPhase.ACTIVE and s.adapter.config.is_client)
    order = trainer.rank_0.turns.order(state.name for state in active)
    return trainer.rank_0.clients.first(order, partial(may_begin, trainer))


def batch_of(state: TrainingState, groups: list[TrajectoryGroup]) -> tuple[TrainBatch, dict[int, int]]:
    """The batch of the next step, and its staleness histogram in tokens.

    Raises:
        StalenessError: a token is older than ``max_staleness`` (contract C7).
    """
    batch = collate(groups)
    return batch, assert_staleness(batch, state.version, state.adapter.run.max_staleness)

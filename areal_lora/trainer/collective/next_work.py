"""What the trainer does next: rank 0 decides, every rank receives the decision. `turns` has the order.

Operations of clients run in the background once they are started, so that the trainer never waits for a disk or for
servers because of them, and other adapters have their turns meanwhile::

    OptimStep, LoadState -> checkpoint    the next checkpoint or saved state waits for it
    SaveState -> saved state              "
    Publish -> transfer and activation    the next publish waits for it
    Pass                                  waits for nothing
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from areal_lora.algorithms.fair_queue import before
from areal_lora.operations.protocol import Operation, Pass, Publish
from areal_lora.rollout.channel.client import SHORT_POLL_S
from areal_lora.trainer.collective.waits import RETRY_S, catch_up
from areal_lora.trainer.roster.roster_plan import SERVED
from areal_lora.trainer.training_state import Rank0, Trainer
from areal_lora.trainer.work import (
    AdapterChange,
    CatchUp,
    Conclude,
    EndRun,
    Operate,
    PublishFault,
    Waiting,
    Work,
    share,
)
from areal_lora.types import AdapterPhase

CLIENT_POLL_S = 0.02
"""Of a poll of the controller, where clients wait for answers."""

Changes = Callable[[], AdapterChange | None]


def next_work(trainer: Trainer, changes: Changes = lambda: None) -> Work | None:
    """What is to be done next, the same on every rank; None once no adapter remains and none will come.

    Rank 0 calls ``changes``, which adapters join, leave, pause or resume, between two steps and about every second
    while it waits. While it waits for work, it renews the time-out of the other ranks (`work.Waiting`).
    """
    while True:
        work = share(_decide(trainer, trainer.rank_0, changes) if trainer.rank_0 else None, trainer.control)
        if isinstance(work, EndRun):
            return None
        if not isinstance(work, CatchUp):
            return work
        catch_up(trainer)


def _decide(trainer: Trainer, rank_0: Rank0, changes: Changes) -> Work:
    """Changes of adapters come first, then what has ended in the background, then whose turn it is (`turns.before`)."""
    if (change := changes()) is not None:
        return change
    operation = _of_clients(trainer)
    if isinstance(operation, Conclude):
        return operation
    active, draining = (
        [s.name for s in trainer.states.values() if s.phase is phase]
        for phase in (AdapterPhase.ACTIVE, AdapterPhase.DRAINING)
    )
    remain = any(state.phase in SERVED for state in trainer.states.values())
    if not remain and (rank_0.desired is None or rank_0.desired.closed):
        return EndRun()
    clients = {state.name for state in trainer.states.values() if state.adapter.config.is_client}
    wanted = before(rank_0.turns.order(active), clients, operation.adapter if operation else None)
    if operation is not None and not wanted:
        return operation
    poll_s = 0.0 if operation else CLIENT_POLL_S if clients else SHORT_POLL_S
    interruption = partial(_interruption, trainer, changes, Waiting(trainer.control))
    refs = [trainer.states[name].ref for name in wanted]
    return rank_0.controller.next_work(refs, draining, interruption, poll_s)


def _interruption(trainer: Trainer, changes: Changes, waiting: Waiting) -> Work | None:
    """What is to be done before the next batch, on rank 0."""
    waiting.signal()
    if (failed := trainer.publishing.failed()) is not None:
        return PublishFault(adapter=failed)
    if trainer.publishing.changed():
        return CatchUp()
    return changes() or _of_clients(trainer)


def _of_clients(trainer: Trainer) -> Operate | Conclude | None:
    """What has ended in the background, else the operation of the client whose turn it is among them, on rank 0."""
    if trainer.rank_0 is None or trainer.rank_0.clients is None:
        return None
    if (ended := concluded(trainer)) is not None:
        return ended
    trainer.rank_0.clients.listen()
    active = (s for s in trainer.states.values() if s.phase is AdapterPhase.ACTIVE and s.adapter.config.is_client)
    order = trainer.rank_0.turns.order(state.name for state in active)
    return trainer.rank_0.clients.first(order, partial(may_start, trainer))


def may_start(trainer: Trainer, operation: Operation) -> bool:
    """Whether nothing that is in progress of its adapter has to end before ``operation``.

    A publish is not started before the version is durable: servers may not hold one that could be made again.
    """
    name = operation.adapter
    if isinstance(operation.what, Pass):
        return True
    if isinstance(operation.what, Publish) and trainer.publishing.busy(name):
        return False
    return trainer.checkpointing.pending(name) is None


def concluded(trainer: Trainer) -> Conclude | None:
    """The first publish, checkpoint or saved state of a client's adapter that has ended and that no rank has joined."""
    for state in trainer.states.values():
        if not state.adapter.config.is_client or state.phase not in SERVED:
            continue
        if trainer.publishing.ended(state.name):
            return Conclude(adapter=state.name, publish=True)
        save = trainer.checkpointing.pending(state.name)
        if save is None or not save.ended.is_set():
            continue
        again = save.failed and not save.label
        if not again or save.error is not None or time.monotonic() - save.ended_s >= RETRY_S:
            return Conclude(adapter=state.name, publish=False)
    return None

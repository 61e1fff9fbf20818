"""What is in progress of clients' adapters in the background: what may begin beside it, and what has ended. On rank 0.

    OptimStep, LoadState -> checkpoint    the next checkpoint or saved state waits for it
    SaveState -> saved state              "
    Publish -> transfer and activation    the next publish waits for it
    Pass                                  waits for nothing

So the trainer never waits for a disk or for servers here: other adapters have their turns meanwhile.
"""

from __future__ import annotations

import time

from areal_lora.operations.messages import Operation, Pass, Publish
from areal_lora.trainer.roster import SERVED
from areal_lora.trainer.state import Trainer
from areal_lora.trainer.work import Concludes

AGAIN_S = 1.0
"""Before a checkpoint that could not be written is tried again."""


def may_begin(trainer: Trainer, operation: Operation) -> bool:
    """Whether nothing that is in progress of its adapter has to end before ``operation``.

    A publish is not begun before the version is durable: servers may not hold one that could be made again.
    """
    name = operation.adapter
    if isinstance(operation.what, Pass):
        return True
    if isinstance(operation.what, Publish) and trainer.publishing.busy(name):
        return False
    return trainer.checkpointing.pending(name) is None


def concluded(trainer: Trainer) -> Concludes | None:
    """The first publish, checkpoint or saved state of a client's adapter that has ended and that no rank has joined."""
    for state in trainer.states.values():
        if not state.adapter.config.is_client or state.phase not in SERVED:
            continue
        if trainer.publishing.ended(state.name):
            return Concludes(adapter=state.name, publish=True)
        save = trainer.checkpointing.pending(state.name)
        if save is None or not save.ended.is_set():
            continue
        again = save.failed and not save.label
        if not again or save.error is not None or time.monotonic() - save.ended_s >= AGAIN_S:
            return Concludes(adapter=state.name, publish=False)
    return None

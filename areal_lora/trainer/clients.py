"""Rank 0's side of adapters that clients drive: which operation is next, and what the service hears.

    service -> link -> `Backlog` -> `Clients.first`: the next operation that all ranks carry out
                           ^             | what cannot be carried out ends here
                           '-- `Clients.complete` <- outcome

It takes the place that `ControllerLink` has for adapters with rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from areal_lora.checkpoint.files import Disk
from areal_lora.operations.backlog import Backlog
from areal_lora.operations.link import TrainerEnd
from areal_lora.operations.messages import (
    Completed,
    DropState,
    Failed,
    Kept,
    LoadState,
    Operation,
    OptimStep,
    Outcome,
    Pass,
    SaveState,
    ToService,
    encode,
)
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.adapter import Adapter, ControllerState
from areal_lora.trainer.passes import Limits, problem
from areal_lora.trainer.saved_states import loadable, named
from areal_lora.trainer.work import Operates
from areal_lora.types import AdapterRef

log = get_logger(__name__)
_decode = msgspec.msgpack.Decoder(Completed).decode


class Clients:
    """One per run with a service. ``base`` is the digest of the base model."""

    def __init__(self, run_folder: RunFolder, end: TrainerEnd, limits: Limits, base: str) -> None:
        self._run_folder, self._end, self._limits, self._base = run_folder, end, limits, base
        self.known: set[str] = set()
        """Adapters that a client drives or has driven. Other threads ask, too."""
        self._backlog = Backlog()
        self._adapters: dict[str, Adapter] = {}
        self._settled: dict[str, bytes] = {}

    # ------------------------------------------------------------ as ControllerLink

    def join(self, adapter: Adapter, version: int, kept: ControllerState) -> str:
        """The service hears what is expected; nothing prevents it."""
        self.known.add(adapter.name)
        self._adapters[adapter.name], self._settled[adapter.name] = adapter, kept.ledger
        self._send(self._backlog.join(adapter.name, _decode(kept.ledger) if kept.ledger else None))
        return ""

    def state(self, adapter: str) -> ControllerState:
        """What a checkpoint keeps: the outcome of the operation that made it."""
        return ControllerState(ledger=self._settled[adapter])

    def pause(self, adapter: str, paused: bool) -> None:
        """Its operations wait."""

    def end(self, adapter: str, reason: str) -> None:
        """Its operations fail from now on."""
        self._adapters.pop(adapter, None)
        self._settled.pop(adapter, None)
        self._send(self._backlog.leave(adapter, reason))

    def evaluate_if_due(self, ref: AdapterRef) -> None:
        """There are no evaluations."""

    # ------------------------------------------------------------ operations

    def listen(self, wait_s: float = 0.0) -> None:
        """Take in what the service has sent, after at most ``wait_s`` if that is nothing."""
        for message in self._end.take(wait_s):
            self._send(self._backlog.receive(message))

    def first(self, adapters: Sequence[str]) -> Operates | None:
        """The next operation of the first of ``adapters`` that has one; those for rank 0 alone are done here."""
        while (operation := self._backlog.first(adapters)) is not None:
            refused = self._backlog.refused(operation) or self._refused(operation)
            if isinstance(operation.what, OptimStep | LoadState) or not (refused or self._own(operation)):
                return Operates(adapter=operation.adapter, operation=operation, refused=refused)
            self.complete(operation, refused or self._dropped(operation))
        return None

    def settle(self, operation: Operation, outcome: Outcome) -> None:
        """The next checkpoint of the adapter is that of ``operation``."""
        completed = Completed(adapter=operation.adapter, number=operation.number, outcome=outcome)
        self._settled[operation.adapter] = encode(completed)

    def complete(self, operation: Operation, outcome: Outcome) -> None:
        """An operation has ended."""
        if isinstance(outcome, Failed):
            log.warning("operation %d of %s failed: %s", operation.number, operation.adapter, outcome.reason)
        self._send(self._backlog.complete(operation, outcome))

    def close(self) -> None:
        self._end.close()

    def _send(self, messages: Sequence[ToService]) -> None:
        for message in messages:
            self._end.send(message)

    def _refused(self, operation: Operation) -> Failed | None:
        """What is wrong with the operation itself."""
        wrong = ""
        match operation.what:
            case Pass() as asked:
                wrong = problem(asked, self._limits)
            case OptimStep() as step:
                wrong = _bad_step(step)
            case SaveState(label=label) | DropState(label=label):
                wrong = named(label)
            case LoadState() as asked:
                wrong = loadable(self._run_folder, asked, self._adapters[operation.adapter], self._base)
        return Failed(reason=wrong, by_client=True) if wrong else None

    def _own(self, operation: Operation) -> bool:
        """Whether rank 0 needs no other rank for it."""
        return isinstance(operation.what, DropState)

    def _dropped(self, operation: Operation) -> Outcome:
        assert isinstance(operation.what, DropState)
        folder = self._run_folder.saved_state(operation.adapter, operation.what.label)
        try:
            Disk().remove(folder)
        except OSError as error:
            return Failed(reason=f"{error.filename or folder}: {error.strerror}", by_client=False)
        return Kept(step=0, n_bytes=0)


def _bad_step(step: OptimStep) -> str:
    """What no AdamW step can take."""
    values = (step.lr, step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_clip_norm)
    if not all(math.isfinite(value) and value >= 0 for value in values):
        return "a number of the step is negative or not finite"
    return "" if step.beta1 < 1 and step.beta2 < 1 else "beta1 and beta2 must be below 1"

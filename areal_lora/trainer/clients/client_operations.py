"""Rank 0's side of adapters that clients drive: which operation is next, and the answers to the service.

    service -> link -> `Backlog` -> `Clients.ready`: the next operations that all ranks carry out
                           ^             | what cannot be carried out ends here
                           |-- complete, settle <- outcome of a pass, of a step
                           |-- durable, kept <- saver thread: a checkpoint, a saved state
                           '-- active <- publisher thread: a version

It takes the place that `ControllerLink` has for adapters with rollouts. Answers leave from whichever thread has them:
the main thread may be in the middle of another adapter's step.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from areal_lora.checkpoint.checkpoint_store import CheckpointSave
from areal_lora.checkpoint.state import Disk
from areal_lora.operations import protocol
from areal_lora.operations.link import TrainerEnd
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.adapter import Adapter, ControllerState
from areal_lora.trainer.clients.client_passes import Limits, loadable, named, problem
from areal_lora.trainer.step_metrics import Window
from areal_lora.trainer.work import Operate
from areal_lora.types import AdapterRef

log = get_logger(__name__)
_decode = msgspec.msgpack.Decoder(tuple[protocol.OperationCompletion, ...]).decode


class Clients:
    """One per run with a service. ``base`` is the digest of the base model.

    The saver's and the publisher's thread call `durable`, `kept` and `active`, the main thread everything else.
    """

    def __init__(self, run_folder: RunFolder, end: TrainerEnd, limits: Limits, base: str) -> None:
        self._run_folder, self._end, self._limits, self._base = run_folder, end, limits, base
        self.known: set[str] = set()
        """Adapters that a client drives or has driven. Other threads read it, too."""
        self.windows: dict[str, Window] = {}
        """By adapter, what the passes of its window were about."""
        self._adapters: dict[str, Adapter] = {}
        self._lock = threading.Lock()
        """Of the following, and of the order in which messages leave."""
        self._backlog = protocol.Backlog()
        self._saves: dict[str, int] = {}
        self._publishes: dict[str, tuple[int, int]] = {}
        """By adapter, number of the operation that saves its state; that of the publish, and version."""

    # ------------------------------------------------------------ as ControllerLink

    def join(self, adapter: Adapter, version: int, kept: ControllerState) -> str:
        """The service receives the expected number of an operation; nothing prevents it."""
        self.known.add(adapter.name)
        self._adapters[adapter.name], self.windows[adapter.name] = adapter, Window()
        with self._lock:
            self._end.send(self._backlog.join(adapter.name, version, _decode(kept.ledger) if kept.ledger else None))
        return ""

    def state(self, adapter: str) -> ControllerState:
        """What a checkpoint keeps: outcomes that the service may not have, see `Backlog.outcomes`."""
        with self._lock:
            return ControllerState(ledger=protocol.encode(self._backlog.outcomes(adapter)))

    def pause(self, adapter: str, paused: bool) -> None:
        """Its operations wait."""

    def end(self, adapter: str, reason: str) -> None:
        """Its operations fail from now on."""
        for by_adapter in (self._adapters, self.windows):
            by_adapter.pop(adapter, None)
        with self._lock:
            self._saves.pop(adapter, None)
            self._publishes.pop(adapter, None)
            self._end.send(self._backlog.leave(adapter, reason))

    def evaluate_if_due(self, ref: AdapterRef, *, saved: bool) -> None:
        """There are no evaluations."""

    # ------------------------------------------------------------ operations

    def listen(self, wait_s: float = 0.0) -> None:
        """Take in what the service has sent, after at most ``wait_s`` if that is nothing."""
        received = self._end.take(wait_s)
        with self._lock:
            for message in received:
                self._end.send(self._backlog.receive(message))

    def ready(
        self, adapters: Sequence[str], may_start: Callable[[protocol.Operation, float], bool]
    ) -> Iterator[Operate]:
        """The next operation of each of ``adapters`` that has one that ``may_start``, given `Backlog.ahead`.

        Those for rank 0 alone are done here, when it is the turn of their adapter.
        """
        for adapter in adapters:
            while True:
                with self._lock:
                    operation, ahead = self._backlog.first([adapter]), self._backlog.ahead(adapter)
                if operation is None or not may_start(operation, ahead):
                    break
                with self._lock:
                    refused = self._backlog.refused(operation)
                what = operation.what
                mine = self._adapters[adapter]
                if refused is None and (wrong := _wrong(what, self._limits, self._run_folder, mine, self._base)):
                    refused = protocol.OperationFailure(reason=wrong, by_client=True)
                if refused and not protocol.ends_window(what):
                    self.complete(operation, refused)
                elif isinstance(what, protocol.DropState):
                    self.complete(operation, _dropped(self._run_folder.saved_state(adapter, what.label)))
                else:
                    yield Operate(adapter=adapter, operation=operation, refused=refused)
                    break

    def complete(self, operation: protocol.Operation, outcome: protocol.Outcome) -> None:
        """An operation was carried out, and its outcome is final."""
        _log(operation.adapter, operation.number, outcome)
        if isinstance(operation.what, protocol.Pass) and isinstance(outcome, protocol.PassResult):
            self.windows[operation.adapter].add(operation.what, outcome)
        with self._lock:
            self._end.send(self._backlog.complete(operation, outcome))

    def settle(self, operation: protocol.Operation, outcome: protocol.Outcome) -> None:
        """``operation`` has made the adapter's version. ``outcome`` is final, that of a load once it is durable."""
        self.windows[operation.adapter] = Window()
        _log(operation.adapter, operation.number, outcome)
        with self._lock:
            self._backlog.start(operation, outcome)
            if not isinstance(operation.what, protocol.LoadState):
                self._end.send(self._backlog.end(operation.adapter, operation.number))

    def start(self, operation: protocol.Operation, version: int) -> None:
        """The next save of the adapter is that of ``operation``, or the publish of ``version``, which starts now."""
        with self._lock:
            self._backlog.start(operation, None)
            if isinstance(operation.what, protocol.Publish):
                self._publishes[operation.adapter] = (operation.number, version)
            else:
                self._saves[operation.adapter] = operation.number

    # ------------------------------------------------------------ other threads

    def durable(self, ref: AdapterRef) -> None:
        """The checkpoint ``ref`` is on the disk: a crash does not repeat the operations up to it."""
        reached("trainer.operation.durable")
        with self._lock:
            self._end.send(self._backlog.durable(ref.name, ref.version))

    def kept(self, save: CheckpointSave) -> None:
        """A saved state is on the disk, or could not be written."""
        outcome: protocol.Outcome = protocol.StateResult(step=save.step, n_bytes=save.nbytes)
        if save.failed:
            fix = "free disk space or repair the disk, then save again"
            outcome = protocol.OperationFailure(reason=f"{save.reason} (fix: {fix})", by_client=False)
        with self._lock:
            if (number := self._saves.pop(save.ref.name, None)) is not None:
                _log(save.ref.name, number, outcome)
                self._end.send(self._backlog.end(save.ref.name, number, outcome))

    def active(self, ref: AdapterRef) -> None:
        """Servers serve ``ref``."""
        with self._lock:
            number, version = self._publishes.get(ref.name, (0, -1))
            if version == ref.version:
                del self._publishes[ref.name]
                self._end.send(self._backlog.end(ref.name, number, protocol.PublishResult(version=version)))

    def close(self) -> None:
        self._end.close()


def _wrong(what: protocol.What, limits: Limits, run_folder: RunFolder, adapter: Adapter, base: str) -> str:
    """What is wrong with the operation itself; empty for nothing."""
    match what:
        case protocol.Pass():
            return problem(what, limits)
        case protocol.OptimStep():
            values = (what.lr, what.beta1, what.beta2, what.eps, what.weight_decay, what.grad_clip_norm)
            if not all(math.isfinite(value) and value >= 0 for value in values):
                return "a number of the step is negative or not finite"
            return "" if what.beta1 < 1 and what.beta2 < 1 else "beta1 and beta2 must be below 1"
        case protocol.SaveState(label=label) | protocol.DropState(label=label):
            return named(label)
        case protocol.LoadState():
            return loadable(run_folder, what, adapter, base)
    return ""


def _dropped(folder: Path) -> protocol.Outcome:
    try:
        Disk().remove(folder)
    except OSError as error:
        return protocol.OperationFailure(reason=f"{error.filename or folder}: {error.strerror}", by_client=False)
    return protocol.StateResult(step=0, n_bytes=0)


def _log(adapter: str, number: int, outcome: protocol.Outcome) -> None:
    if isinstance(outcome, protocol.OperationFailure):
        log.warning("operation %d of %s failed: %s", number, adapter, outcome.reason)

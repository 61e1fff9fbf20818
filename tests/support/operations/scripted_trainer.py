"""A trainer without a model, for tests of what sends operations: it answers them by rules that a test can compute.

The log-probability of a target is ``-(1 + token mod 7) / 8`` minus ``steps / 64``, so that steps show; the loss is the
sum of ``-w l`` for every kind. What a trainer keeps over a crash is in `Disk`; `ScriptedTrainer.crash` loses the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from areal_lora.operations.link import TrainerEnd
from areal_lora.operations.protocol import (
    Backlog,
    Datum,
    DropState,
    LoadState,
    Operation,
    OperationCompletion,
    OperationFailure,
    OptimStep,
    Outcome,
    Pass,
    PassResult,
    Poison,
    Publish,
    PublishResult,
    SaveState,
    StateResult,
    StepResult,
    ends_window,
)
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.paths import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An adapter: steps taken, the number of the operation that made it, the passes of its window."""

    steps: int = 0
    version: int = 0
    window: int = 0


@dataclass(slots=True, kw_only=True)
class Disk:
    """What survives a crash: the newest checkpoint of each adapter with its outcomes, and labelled states."""

    checkpoints: dict[str, tuple[Model, tuple[OperationCompletion, ...]]] = field(default_factory=dict)
    states: dict[tuple[str, str], Model] = field(default_factory=dict)


class ScriptedTrainer:
    """Rank 0 of the run in ``run_folder``, in a thread of its own.

    ``fault(operation)``, called in that thread, may return what becomes of an operation instead; it may also wait.
    ``writes()``, called when a version is made, is whether it gets a checkpoint; one that is loaded has one.
    ``carried_out`` are all operations in order, over crashes as well.
    """

    def __init__(
        self, run_folder: RunFolder, fault: Callable[[Operation], OperationFailure | None] = lambda _: None
    ) -> None:
        self.disk, self.fault = Disk(), fault
        self.writes: Callable[[], bool] = lambda: True
        self.carried_out: list[Operation] = []
        self._run_folder = run_folder
        self._lock = threading.Lock()
        self._begin()

    def join(self, adapter: str) -> None:
        """A new adapter begins, or one that has a checkpoint again."""
        with self._lock:
            model, kept = self.disk.checkpoints.setdefault(adapter, (Model(), ()))
            self._models[adapter] = replace(model, window=0)
            for message in self._backlog.join(adapter, model.version, kept):
                self._end.send([message])

    def leave(self, adapter: str, reason: str = "it was deleted") -> None:
        with self._lock:
            self._models.pop(adapter)
            for message in self._backlog.leave(adapter, reason):
                self._end.send([message])

    def crash(self) -> None:
        """End without a word, and begin again with what is on the disk."""
        here = list(self._models)
        self.close()
        self._begin()
        for adapter in here:
            self.join(adapter)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(150)
        self._end.close()

    def _begin(self) -> None:
        self._models: dict[str, Model] = {}
        self._backlog = Backlog()
        self._stop = threading.Event()
        self._end = TrainerEnd(self._run_folder)
        self._thread = watched_thread("scripted-trainer", self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            for message in self._end.take(0.02):
                with self._lock:
                    for answer in self._backlog.receive(message):
                        self._end.send([answer])
            while not self._stop.is_set() and (operation := self._next()) is not None:
                outcome = self.fault(operation)
                with self._lock:
                    self._carry_out(operation, outcome)

    def _next(self) -> Operation | None:
        with self._lock:
            return self._backlog.first(list(self._models))

    def _carry_out(self, operation: Operation, outcome: Outcome | None) -> None:
        if operation.adapter not in self._models:
            return  # it has left meanwhile
        self.carried_out.append(operation)
        outcome = outcome or self._backlog.refused(operation) or self._outcome(operation)
        self._end.send(self._backlog.complete(operation, outcome))
        if ends_window(operation.what):
            model = replace(self._models[operation.adapter], version=operation.number, window=0)
            self._models[operation.adapter] = model
            if isinstance(operation.what, LoadState) or self.writes():
                self.write(operation.adapter)

    def write(self, adapter: str) -> None:
        """Write the newest version's checkpoint."""
        model = self._models[adapter]
        self.disk.checkpoints[adapter] = (model, self._backlog.outcomes(adapter))
        self._end.send(self._backlog.durable(adapter, model.version))

    def _outcome(self, operation: Operation) -> Outcome:
        name, model = operation.adapter, self._models[operation.adapter]
        match operation.what:
            case Pass(data=data, backward=backward):
                scored = scores(data, model.steps)
                self._models[name] = replace(model, window=model.window + backward)
                return scored
            case OptimStep():
                self._models[name] = replace(model, steps=model.steps + 1)
                return StepResult(step=model.steps + 1, grad_norm=float(model.window), skipped=False)
            case SaveState(label=label):
                self.disk.states[name, label] = model
                return StateResult(step=model.steps, n_bytes=1000)
            case DropState(label=label):
                kept = self.disk.states.pop((name, label), None)
                return StateResult(step=kept.steps if kept else 0, n_bytes=0)
            case LoadState(adapter=source, label=label):
                if (source, label) not in self.disk.states:
                    return OperationFailure(reason=f"{source} has no state {label!r}", by_client=True)
                steps = self.disk.states[source, label].steps
                self._models[name] = replace(model, steps=steps)
                return StateResult(step=steps, n_bytes=1000)
            case Publish():
                return PublishResult(version=model.version)
            case Poison(reason=reason):
                return OperationFailure(reason=reason, by_client=False)


def scores(data: tuple[Datum, ...], steps: int) -> PassResult:
    """The answer of a model with so many steps."""
    rows = [-(1 + np.frombuffer(d.tokens, "<i4")[1:] % 7) / 8 - steps / 64 for d in data]
    weights = [np.frombuffer(d.weights, "<f4").astype(np.float64) for d in data]
    loss = -sum(float((w * row).sum()) for w, row in zip(weights, rows, strict=True))
    return PassResult(logprobs=tuple(row.astype("<f4").tobytes() for row in rows), loss=loss)

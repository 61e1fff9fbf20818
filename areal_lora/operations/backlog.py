"""Which operations wait, which windows are poisoned, which outcomes the service has not acknowledged. Pure.

    ServiceHello    -> what was not acknowledged, then `Expects` of every adapter
    Operation       -> it waits; one received before is ignored, one that does not follow is answered by `Expects`
    Acknowledgement -> outcomes are forgotten

The trainer carries out the first operation of an adapter, and calls `complete` with its outcome. Where the outcome has
to wait, for a checkpoint or for servers, it calls `start`, and `end` later; meanwhile the operations that follow may be
carried out, and their outcomes wait as well: the service receives outcomes in the order of the numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from areal_lora.operations.protocol import (
    Acknowledgement,
    Expects,
    LoadState,
    Operation,
    OperationCompletion,
    OperationFailure,
    OptimStep,
    Outcome,
    Pass,
    PassResult,
    Poison,
    ServiceHello,
    ToService,
    ToTrainer,
    ends_window,
)


@dataclass(slots=True, kw_only=True)
class Outstanding:
    """An operation that was carried out; ``outcome`` None: it is not known yet. ``final``: it may be sent."""

    number: int
    outcome: Outcome | None
    final: bool = False


@dataclass(slots=True, kw_only=True)
class Queue:
    """Operations of one adapter.

    ``expects`` is the next number. ``poison`` is the first fault of the window, ``passes`` those that gave gradients.
    ``outstanding`` were carried out before those that are ``waiting``.
    """

    expects: int
    waiting: deque[Operation] = field(default_factory=deque)
    outstanding: deque[Outstanding] = field(default_factory=deque)
    outcomes: dict[int, OperationCompletion] = field(default_factory=dict)
    poison: OperationFailure | None = None
    passes: int = 0


class Backlog:
    """Everything by adapter. Messages that it returns are to be sent to the service, in their order."""

    def __init__(self) -> None:
        self._queues: dict[str, Queue] = {}
        self._gone: dict[str, str] = {}

    def join(self, adapter: str, last: OperationCompletion | None) -> list[ToService]:
        """An adapter joins; ``last`` is the outcome in its checkpoint, None for a new one."""
        queue = Queue(expects=last.number + 1 if last else 1)
        if last:
            queue.outcomes[last.number] = last
        self._queues[adapter] = queue
        self._gone.pop(adapter, None)
        return [*queue.outcomes.values(), Expects(adapter=adapter, number=queue.expects)]

    def leave(self, adapter: str, reason: str) -> list[ToService]:
        """Its operations without a final outcome have failed, and so will those that come."""
        queue = self._queues.pop(adapter, None)
        self._gone[adapter] = reason
        if queue is None:
            return []
        numbers = [*(each.number for each in queue.outstanding), *(each.number for each in queue.waiting)]
        return [_failed(adapter, number, reason) for number in numbers]

    def receive(self, message: ToTrainer) -> list[ToService]:
        """What to answer at once."""
        match message:
            case ServiceHello():
                return list(self._all())
            case Acknowledgement(adapter=adapter, number=number):
                outcomes = self._queues[adapter].outcomes if adapter in self._queues else {}
                for old in [n for n in outcomes if n <= number]:
                    del outcomes[old]
                return []
            case Operation(adapter=adapter, number=number):
                if adapter not in self._queues:
                    return [_failed(adapter, number, self._gone[adapter])] if adapter in self._gone else []
                queue = self._queues[adapter]
                if number > queue.expects:
                    return [Expects(adapter=adapter, number=queue.expects)]
                if number == queue.expects:
                    queue.expects += 1
                    queue.waiting.append(message)
                return []

    def first(self, adapters: Sequence[str]) -> Operation | None:
        """The next operation to carry out, of the first of ``adapters`` that has one."""
        queues = (self._queues[adapter] for adapter in adapters if adapter in self._queues)
        return next((queue.waiting[0] for queue in queues if queue.waiting), None)

    def refused(self, operation: Operation) -> OperationFailure | None:
        """What becomes of an operation that its window does not allow; None for one that is to be carried out."""
        queue = self._queues[operation.adapter]
        match operation.what:
            case Poison(reason=reason, by_client=by_client):
                return OperationFailure(reason=reason, by_client=by_client)
            case Pass() | OptimStep() if queue.poison is not None:
                return queue.poison
            case OptimStep() if not queue.passes:
                return OperationFailure(reason="no pass since the step before it gave gradients", by_client=True)
        return None

    def complete(self, operation: Operation, outcome: Outcome) -> list[ToService]:
        """The first operation of its adapter was carried out, with ``outcome``."""
        self.start(operation, outcome)
        return self.end(operation.adapter, operation.number, outcome)

    def start(self, operation: Operation, outcome: Outcome | None) -> None:
        """The first operation of its adapter was carried out; ``outcome`` is None where `end` alone will know it."""
        queue = self._queues[operation.adapter]
        assert queue.waiting[0] == operation
        queue.waiting.popleft()
        queue.outstanding.append(Outstanding(number=operation.number, outcome=outcome))
        what = operation.what
        if ends_window(what):
            queue.passes, queue.poison = 0, None
        elif isinstance(what, Pass) and what.backward and isinstance(outcome, PassResult):
            queue.passes += 1
        spoils = isinstance(what, Pass | LoadState) or (isinstance(what, Poison) and not what.of_step)
        if spoils and isinstance(outcome, OperationFailure) and not queue.poison:
            queue.poison = OperationFailure(
                reason=f"its window has failed: {outcome.reason}", by_client=outcome.by_client
            )

    def end(self, adapter: str, number: int, outcome: Outcome | None = None) -> list[ToService]:
        """The outcome of an operation that has started is final: ``outcome``, or the one that `start` was given."""
        queue, final = self._queues.get(adapter), list[ToService]()
        if queue is None:
            return []  # it has left meanwhile
        for each in queue.outstanding:
            if each.number == number:
                each.outcome, each.final = outcome or each.outcome, True
        while queue.outstanding and queue.outstanding[0].final:
            first = queue.outstanding.popleft()
            assert first.outcome is not None
            completed = OperationCompletion(adapter=adapter, number=first.number, outcome=first.outcome)
            queue.outcomes[first.number] = completed
            final.append(completed)
        return final

    def _all(self) -> Iterator[ToService]:
        for adapter, queue in self._queues.items():
            yield from queue.outcomes.values()
            yield Expects(adapter=adapter, number=queue.expects)


def _failed(adapter: str, number: int, reason: str) -> OperationCompletion:
    return OperationCompletion(adapter=adapter, number=number, outcome=OperationFailure(reason=reason, by_client=False))

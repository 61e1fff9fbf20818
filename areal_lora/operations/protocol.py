"""What a client does with its adapter: operations that the service hands to trainer rank 0, and what comes of them.

    service  -- Operation(adapter, number, what) -->           rank 0  numbers 1, 2, 3, ... of each adapter, no gaps
    service  <-- OperationCompletion(adapter, number, outcome) rank 0  in the order of the numbers of each adapter
    service  -- Acknowledgement(adapter, number) -->           rank 0  the service's file has the outcome
    service  -- ServiceHello -->                               rank 0  after every start or reconnect of the service
    service  <-- Expects(adapter, number) --                   rank 0  after that, when an adapter joins or resumes
    service  <-- Durable(adapter, number) --                   rank 0  a checkpoint has them: the log is cut there

An `OptimStep` ends a window: the passes since the `OptimStep` or `LoadState` before it. A pass that fails, or a
`Poison` in its place, poisons its window: the step then fails, changes nothing and makes no version. A `Poison` in
place of a step ends the window as that step would have.

What ends a window (`ends_window`), also where it fails, makes the version of its number: a `Publish` makes no other,
and a new adapter is version 0. Checkpoints are written behind: a step completes when it is computed. After a restart of
the trainer an adapter expects the number after its newest checkpoint, and the service sends again from there. The same
comes of it, but for the rounding of passes that are computed together; a `Poison` replaces a pass that had failed, or
whose step had. A `LoadState` completes when its checkpoint is durable: what it loads may be dropped afterwards.

Outcomes that were not acknowledged are sent again after `ServiceHello`, and those of the newest checkpoint after a
restart: the service ignores a second one. Arrays are bytes, little-endian, one dimension.

The trainer's side, pure::

    ServiceHello    -> what no Acknowledgement has named, then `Expects` of every adapter
    Operation       -> it waits; one received before is ignored, one that does not follow is answered by `Expects`

The trainer carries out an adapter's first operation and calls `complete` with the outcome; where that waits for a disk
or servers, `start`, later `end` or `durable`. Outcomes of operations that follow wait as well, in order of the numbers.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import msgspec


class Loss(StrEnum):
    """Sums over the targets of all data, each times its weight w.

    l is the new log-probability of a target, q the sampler's, A its advantage.

    ``cross_entropy``        - sum w l
    ``importance_sampling``  - sum w r A, r = exp(l - q)
    ``ppo``                  - sum w min(r A, clip(r, low, high) A); low 0.8, high 1.2
    ``cispo``                - sum w stop_gradient(clip(r, low, high)) l A; low 0, high 4
    ``dro``                  - sum w (l A - beta / 2 (l - q)^2); beta 0.05
    ``gspo``                 ``ppo`` with the sequence's mean ratio; low 0.9997, high 1.0004
    ``stable_reinforce``     - sum w (s l A - beta / 2 (l - q)^2), s = 1 if A > 0, else at most the sequence's ratio;
                             beta 0
    """

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"
    STABLE_REINFORCE = "stable_reinforce"


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of L inputs; the target of each is the token that follows it."""

    tokens: bytes  # [L + 1] int32
    weights: bytes  # [L] float32; 0: the target does not count
    logprobs: bytes = b""  # [L] float32, the sampler's; not for cross_entropy
    advantages: bytes = b""  # [L] float32; not for cross_entropy


class LossSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: the default of the loss."""

    clip_low: float | None = None
    clip_high: float | None = None
    beta: float | None = None


class Pass(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Score the data, and with ``backward`` add the gradients of the loss to those of the window."""

    data: tuple[Datum, ...]
    loss: Loss
    settings: LossSettings = LossSettings()
    backward: bool = True

    @property
    def n_tokens(self) -> int:
        return sum(len(datum.tokens) // 4 for datum in self.data)


class OptimStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One AdamW step with the window's summed gradients; it fails without any. ``grad_clip_norm`` 0: no clipping."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Poison(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """In place of an operation that could not be sent. It fails, with what is given here.

    ``of_step``: in place of an `OptimStep`. It ends the window, whose gradients are forgotten.
    """

    reason: str
    by_client: bool = False
    of_step: bool = False


class SaveState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep weights, clock and, where set, ``moments`` under ``label`` until `DropState`, in place of what was kept."""

    label: str
    moments: bool = True


class DropState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Remove what `SaveState` kept; nothing happens if nothing is kept."""

    label: str


class LoadState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Set the adapter to what ``adapter`` saved under ``label``; with ``optimizer`` moments and clock as well.

    Without, moments and clock are reset. One that fails changes nothing, and poisons the window that it starts.
    """

    adapter: str
    label: str
    optimizer: bool


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have the servers serve the adapter as it is now; nothing is sent if they do."""


What: TypeAlias = Pass | OptimStep | Poison | SaveState | DropState | LoadState | Publish


def ends_window(what: What) -> bool:
    """Whether the passes that follow belong to another window, whatever comes of ``what``."""
    return isinstance(what, OptimStep | LoadState) or (isinstance(what, Poison) and what.of_step)


class PassResult(msgspec.Struct, frozen=True, kw_only=True, tag="Scored"):
    """Of a `Pass`: log-probabilities of the targets, [L] float32 for each datum, and the loss as a sum."""

    logprobs: tuple[bytes, ...]
    loss: float


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag="Stepped"):
    """Of an `OptimStep`: steps taken so far, norm of the gradient before clipping.

    ``skipped``: the gradient was not finite; nothing was changed.
    """

    step: int
    grad_norm: float
    skipped: bool


class StateResult(msgspec.Struct, frozen=True, kw_only=True, tag="Kept"):
    """Of `SaveState`, `DropState` and `LoadState`: steps of the state, its bytes on the disk."""

    step: int
    n_bytes: int


class PublishResult(msgspec.Struct, frozen=True, kw_only=True, tag="Published"):
    """Of a `Publish`: servers serve the adapter as ``version``."""

    version: int


class OperationFailure(msgspec.Struct, frozen=True, kw_only=True, tag="Failed"):
    """The operation was not carried out. ``by_client``: repeating it would fail again."""

    reason: str
    by_client: bool


Outcome: TypeAlias = PassResult | StepResult | StateResult | PublishResult | OperationFailure


class Operation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    adapter: str
    number: int
    what: What


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outcomes up to ``number`` need not be sent again."""

    adapter: str
    number: int


class ServiceHello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The service listens from now on."""


class OperationCompletion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    adapter: str
    number: int
    outcome: Outcome


class Expects(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next operation to send; what was sent from ``number`` on counts as lost.

    Sent after `ServiceHello` for each adapter that is there, when an adapter joins, and for a number out of order.
    """

    adapter: str
    number: int


class Durable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A checkpoint has the operations up to ``number``, whose outcomes were sent before: none is expected again."""

    adapter: str
    number: int


ToTrainer: TypeAlias = Operation | Acknowledgement | ServiceHello
ToService: TypeAlias = OperationCompletion | Expects | Durable

encode = msgspec.msgpack.Encoder().encode
decode_to_trainer = msgspec.msgpack.Decoder(ToTrainer).decode
decode_to_service = msgspec.msgpack.Decoder(ToService).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


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
    ``outstanding`` were carried out before those that are ``waiting``. ``durable`` is the version of the newest
    checkpoint, -1 before the first; ``behind`` are the versions made since, and ``cut`` is the newest `Durable` sent.
    """

    expects: int
    durable: int
    cut: int
    behind: deque[int] = field(default_factory=deque)
    waiting: deque[Operation] = field(default_factory=deque)
    outstanding: deque[Outstanding] = field(default_factory=deque)
    outcomes: dict[int, OperationCompletion] = field(default_factory=dict)
    poison: OperationFailure | None = None
    passes: int = 0


class Backlog:
    """Everything by adapter. Messages that it returns are to be sent to the service, in their order."""

    def __init__(self) -> None:
        self._queues: dict[str, Queue] = {}
        self._gone: dict[str, OperationFailure] = {}

    def join(self, adapter: str, version: int, kept: Sequence[OperationCompletion] | None = None) -> list[ToService]:
        """An adapter joins as ``version``, with the `outcomes` that its checkpoint ``kept``; None without one."""
        queue = Queue(expects=version + 1, durable=-1 if kept is None else version, cut=version)
        queue.outcomes = {each.number: each for each in kept or ()}
        self._queues[adapter] = queue
        self._gone.pop(adapter, None)
        return self._known(adapter)

    def leave(self, adapter: str, reason: str) -> list[ToService]:
        """Its operations without a final outcome have failed, and so will those that come."""
        failed = self._gone[adapter] = OperationFailure(reason=reason, by_client=False)
        if (queue := self._queues.pop(adapter, None)) is None:
            return []
        known = (_completed(adapter, each.number, each.outcome if each.final else failed) for each in queue.outstanding)
        return [*known, *(_completed(adapter, each.number, failed) for each in queue.waiting)]

    def receive(self, message: ToTrainer) -> list[ToService]:
        """What to answer at once."""
        match message:
            case ServiceHello():
                return [each for adapter in self._queues for each in self._known(adapter)]
            case Acknowledgement(adapter=adapter, number=number):
                outcomes = self._queues[adapter].outcomes if adapter in self._queues else {}
                for old in [n for n in outcomes if n <= number]:
                    del outcomes[old]
                return []
            case Operation(adapter=adapter, number=number):
                if adapter not in self._queues:
                    return [_completed(adapter, number, self._gone[adapter])] if adapter in self._gone else []
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
            queue.behind.append(operation.number)
        elif isinstance(what, Pass) and what.backward and isinstance(outcome, PassResult):
            queue.passes += 1
        spoils = isinstance(what, Pass | LoadState) or (isinstance(what, Poison) and not what.of_step)
        if spoils and isinstance(outcome, OperationFailure) and not queue.poison:
            reason = f"its window has failed: {outcome.reason}"
            queue.poison = OperationFailure(reason=reason, by_client=outcome.by_client)

    def end(self, adapter: str, number: int, outcome: Outcome | None = None) -> list[ToService]:
        """The outcome of an operation that has started is final: ``outcome``, or the one that `start` was given."""
        if (queue := self._queues.get(adapter)) is None:
            return []  # it has left meanwhile
        for each in queue.outstanding:
            if each.number == number:
                each.outcome, each.final = outcome or each.outcome, True
        return self._final(adapter, queue)

    def durable(self, adapter: str, version: int) -> list[ToService]:
        """The checkpoint of ``version`` is on the disk; outcomes that are known and not final waited for it."""
        if (queue := self._queues.get(adapter)) is None:
            return []
        queue.durable = version
        while queue.behind and queue.behind[0] <= version:
            queue.behind.popleft()
        for each in queue.outstanding:
            each.final = each.final or (each.number <= version and each.outcome is not None)
        return self._final(adapter, queue)

    def ahead(self, adapter: str) -> float:
        """Versions that a crash would repeat; infinite before the first checkpoint: no run resumes from nothing."""
        queue = self._queues.get(adapter)
        return len(queue.behind) if queue and queue.durable >= 0 else math.inf

    def outcomes(self, adapter: str) -> tuple[OperationCompletion, ...]:
        """Known outcomes up to the newest version that are not acknowledged: its checkpoint keeps them."""
        queue = self._queues[adapter]
        newest = queue.behind[-1] if queue.behind else queue.durable
        held = (
            _completed(adapter, each.number, each.outcome) for each in queue.outstanding if each.outcome is not None
        )
        return tuple(each for each in (*queue.outcomes.values(), *held) if each.number <= newest)

    def _final(self, adapter: str, queue: Queue) -> list[ToService]:
        final = list[ToService]()
        while queue.outstanding and queue.outstanding[0].final:
            each = queue.outstanding.popleft()
            queue.outcomes[each.number] = _completed(adapter, each.number, each.outcome)
            final.append(queue.outcomes[each.number])
        if queue.durable > queue.cut and not (queue.outstanding and queue.outstanding[0].number <= queue.durable):
            queue.cut = queue.durable
            final.append(Durable(adapter=adapter, number=queue.cut))
        return final

    def _known(self, adapter: str) -> list[ToService]:
        queue = self._queues[adapter]
        cut = [Durable(adapter=adapter, number=queue.cut)] if queue.cut else []
        return [*queue.outcomes.values(), *cut, Expects(adapter=adapter, number=queue.expects)]


def _completed(adapter: str, number: int, outcome: Outcome | None) -> OperationCompletion:
    assert outcome is not None
    return OperationCompletion(adapter=adapter, number=number, outcome=outcome)

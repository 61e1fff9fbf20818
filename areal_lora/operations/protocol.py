"""What a client does with its adapter: operations that the service hands to trainer rank 0, and what comes of them.

    service  -- Operation(adapter, number, what) -->           rank 0  numbers 1, 2, 3, ... of each adapter, no gaps
    service  <-- OperationCompletion(adapter, number, outcome) rank 0  in the order of the numbers of each adapter
    service  -- Acknowledgement(adapter, number) -->           rank 0  the service's file has the outcome
    service  -- ServiceHello -->                               rank 0  after every start or reconnect of the service
    service  <-- Expects(adapter, number) --                   rank 0  after that, when an adapter joins or resumes

An `OptimStep` ends a window: the passes since the `OptimStep` or `LoadState` before it. A pass that fails, or a
`Poison` in place of one that could not be sent, poisons its window: the step then fails, changes nothing and makes no
version. A `Poison` in place of a step ends the window as that step would have: what follows is the next window.

What ends a window (`ends_window`), also where it fails, is in a checkpoint with its number and its outcome before it
completes. The number is the version of the weights: a `Publish` makes no other, and a new adapter is version 0.
After a restart of the trainer an adapter expects the number that follows its newest checkpoint. The service sends
from there again, the passes of the unfinished window included, and the same bytes come of it; in place of one that
had failed it sends a `Poison`. Therefore it keeps what it sent until an `OptimStep` or a `LoadState` that follows has
completed.

Outcomes that were not acknowledged are sent again after `ServiceHello`, and that of the newest checkpoint after a
restart: the service may receive one twice, and ignores the second. Their tags are in the service's file.

Arrays are bytes, little-endian, one dimension.
"""

from __future__ import annotations

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


class OptimStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One AdamW step with the window's summed gradients; it fails if there are none.

    ``grad_clip_norm`` 0: no clipping.
    """

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
    """Keep weights, moments and clock under ``label`` of this adapter until `DropState`, in place of what was kept."""

    label: str


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


ToTrainer: TypeAlias = Operation | Acknowledgement | ServiceHello
ToService: TypeAlias = OperationCompletion | Expects

encode = msgspec.msgpack.Encoder().encode
decode_to_trainer = msgspec.msgpack.Decoder(ToTrainer).decode
decode_to_service = msgspec.msgpack.Decoder(ToService).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode

"""Requests of SDK clients and their answers. Both are kept in the service's file, and so are their tags.

    action          operations of its model        answer
    CreateModel     none, or LoadState             ActionResult: model, and path if it was loaded
    Train           Pass, OptimStep or Poison      PassResult, StepResult
    Save            SaveState                      ActionResult: path
     for a sampler  SaveState + Publish, Publish   ActionResult: path, or sampler for a save without a name
    Refuse          none                           none but `OperationFailure`
    Load            LoadState                      ActionResult: model and path

Every action may also be answered by `OperationFailure`.
"""

from typing import TypeAlias

import msgspec

from areal_lora.operations.protocol import OperationFailure, OptimStep, Pass, PassResult, Poison, StepResult


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a model. ``seed`` None: that of the run."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    seed: int | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Set the model to the saved state at ``path``; with ``optimizer`` moments and clock as well."""

    path: str
    optimizer: bool


class CreateModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make a model. With ``load`` it starts from the saved state, and has the `Lora` of the model that saved it."""

    lora: Lora | None
    load: Load | None = None
    notes: dict[str, str] = {}


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``Poison`` in place of a pass that cannot be sent; `OperationFailure` answers it and the step of its window."""

    what: Pass | OptimStep | Poison


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep the state under ``name``, for ``ttl_s`` seconds or for ever. ``overwrite``: the name may be in use.

    ``for_sampler``: have servers serve the model as it is. With ``sampler_seq`` in place of a name the answer opens
    that sampling session of the model's session. ``in_flight``: the session samples the newest version at each request,
    and nothing is kept.
    """

    name: str | None = None
    ttl_s: float | None = None
    overwrite: bool = False
    notes: dict[str, str] = {}
    for_sampler: bool = False
    sampler_seq: int | None = None
    in_flight: bool = False


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """In place of what cannot be carried out and changes no weights: it fails when its turn comes, its window does not.

    Without it the number would be missing, and everything behind it would wait.
    """

    reason: str


Action: TypeAlias = CreateModel | Train | Save | Load | Refuse
ModelAction: TypeAlias = Train | Save | Load | Refuse
"""Those with a sequence number of their model."""


class ActionResult(msgspec.Struct, frozen=True, kw_only=True, tag="Done"):
    """What an action has made or set: a model, the state at ``path``, the sampling session of a save without a name.

    ``unloaded``: the model leaves.
    """

    model: str | None = None
    path: str | None = None
    sampler: str | None = None
    unloaded: bool = False


Answer: TypeAlias = PassResult | StepResult | ActionResult | OperationFailure


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """There is no answer yet. ``capacity``: there is no place for its adapter at present."""

    reason: str
    capacity: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_action = msgspec.msgpack.Decoder(Action).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode

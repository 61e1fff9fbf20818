"""Messages between trainer and controller: tagged msgspec structs over zmq, no pickle.

Every request frame is ``[request id (8 bytes), payload]``; the reply repeats the request id.
Each request has exactly one reply, ``Failed`` if it could not be served. Every message about
a policy names its adapter.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from areal_lora.types import TrajectoryGroup

PROTOCOL = 5


class ChannelMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the class name travels as the tag."""


# ---------------------------------------------------------------- trainer -> controller


class Hello(ChannelMessage, frozen=True):
    """Open a session. Reply: Welcome, whose ``session`` every later request carries.

    ``versions`` are by adapter the next version to consume at. A ``trainer`` (random, one per process)
    not seen before has loaded them from its checkpoints: what was consumed or leased at or after
    them is undone. A known trainer greets a restarted controller: nothing is undone.
    ``snapshots`` are the newest the trainer holds (``Batch.snapshot``), for a controller whose ledger is lost.
    """

    trainer: str
    versions: dict[str, int]
    snapshots: dict[str, bytes]
    protocol: int = PROTOCOL


class SessionMessage(ChannelMessage, frozen=True):
    """Base of all requests but Hello. Reply to a ``session`` that has ended: StaleSession."""

    session: str = ""


class AnnounceVersion(SessionMessage, frozen=True, kw_only=True):
    """``adapter@v{version}`` is active on ``servers`` (data-plane URL by name) and nowhere else. Reply: Accepted.

    ``lost`` are servers excluded since the previous announcement. The newest version may be announced
    again, with other servers.
    """

    adapter: str
    version: int
    servers: dict[str, str]
    lost: tuple[str, ...] = ()


class GetBatch(SessionMessage, frozen=True, kw_only=True):
    """Long poll for the groups of ``step``, consumed at ``version``. Reply: Batch or NotReady.

    A repeated request for a step that is not committed gets the same batch.
    """

    adapter: str
    step: int
    version: int
    timeout_s: float


class CommitStep(SessionMessage, frozen=True, kw_only=True):
    """A checkpoint that contains ``step`` and all steps before it is durable. Idempotent. Reply: Accepted."""

    adapter: str
    step: int


class Evaluate(SessionMessage, frozen=True, kw_only=True):
    """Start a greedy evaluation of ``adapter@v{version}`` in the background. Reply: Accepted.

    Idempotent while the evaluation runs, or its result waits to be fetched.
    """

    adapter: str
    version: int
    tag: str


class GetEvents(SessionMessage, frozen=True, kw_only=True):
    """Long poll for evaluation results not yet delivered. Reply: Events (empty after ``timeout_s``)."""

    adapter: str
    timeout_s: float = 0.0


class GetStats(SessionMessage, frozen=True, kw_only=True):
    """Reply: Stats."""

    adapter: str


class Shutdown(SessionMessage, frozen=True, kw_only=True):
    """End the controller. Reply: Accepted."""


# ---------------------------------------------------------------- controller -> trainer


class Welcome(ChannelMessage, frozen=True):
    """``session`` identifies one controller process in contact with one trainer process."""

    adapters: tuple[str, ...]
    session: str
    protocol: int = PROTOCOL


class StaleSession(ChannelMessage, frozen=True):
    """The request carries another session: the controller was restarted, or another trainer has greeted it."""


class Accepted(ChannelMessage, frozen=True):
    pass


class Failed(ChannelMessage, frozen=True):
    reason: str


class Stats(ChannelMessage, frozen=True):
    """Counters of one adapter since the run began; groups unless the name says otherwise.

    ``issued = consumed + leased + ready + running + waiting + sum(dropped)``; ``running`` includes
    groups that wait for a retry, ``waiting`` are issued (again) and not admitted yet. ``rolled_back``
    is part of ``reissued``, and both are of ``dropped``.
    """

    newest_version: int
    waiting: int
    ready: int
    running: int
    leased: int
    leased_steps: int  # handed over and not committed
    issued: int
    consumed: int
    dropped: dict[str, int]
    reissued: int  # issues of a prompt after its first
    rolled_back: int
    retried: dict[str, int]
    late: int  # answers to requests that were abandoned or answered before
    staleness: dict[int, int]  # consume version - oldest token version, at hand-over
    tokens_generated: int
    idle_s: float  # nothing in flight
    generation_s: float  # summed over finished groups
    ahead: int  # this and the next two: see `controller.pacing.PacingStatus`
    margin_s: float
    spare_s: float | None


class RolloutSample(msgspec.Struct, frozen=True, kw_only=True):
    """A readable example for reports."""

    uid: str
    prompt: str
    completion: str
    answer: str
    reward: float
    version: int


class EvalSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of an evaluation. ``reward`` is None if it could not be scored, ``correct`` too without a rule."""

    uid: str
    prompt: str
    completion: str
    answer: str
    reward: float | None
    correct: bool | None
    version: int


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy answers to ``n`` held-out problems; ``error`` is set, and ``n`` is 0, if there are none.

    ``accuracy`` is None where the task has no rule for what is correct. The ``unscored`` ones are not correct, and
    not in ``reward_mean``. ``left_out`` further problems have prompts that are too long; some are named.
    """

    adapter: str
    version: int
    tag: str
    accuracy: float | None
    reward_mean: float | None
    n: int
    wall_s: float
    unscored: int = 0
    left_out: int = 0
    left_out_first: tuple[str, ...] = ()
    samples: tuple[EvalSample, ...] = ()
    error: str = ""


class Batch(ChannelMessage, frozen=True):
    """The groups of one step, oldest issue first; ``events`` are evaluation results not yet delivered.

    ``snapshot`` is the ledger as it will be once this step is consumed: opaque, for the checkpoint.
    """

    adapter: str
    step: int
    groups: tuple[TrajectoryGroup, ...]
    stats: Stats
    samples: tuple[RolloutSample, ...]
    events: tuple[EvalResult, ...]
    snapshot: bytes


class NotReady(ChannelMessage, frozen=True):
    """No full batch within the poll's time-out; ``note`` names a likely reason."""

    ready: int
    needed: int
    running: int
    dropped: int
    note: str = ""


class Events(ChannelMessage, frozen=True):
    events: tuple[EvalResult, ...]


SessionRequest: TypeAlias = AnnounceVersion | GetBatch | CommitStep | Evaluate | GetEvents | GetStats | Shutdown
Request: TypeAlias = Hello | SessionRequest
Reply: TypeAlias = Welcome | StaleSession | Accepted | Failed | Stats | Batch | NotReady | Events

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode

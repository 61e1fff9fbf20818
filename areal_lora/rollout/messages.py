"""What trainer and controller say to each other: tagged msgspec structs over zmq, no pickle.

Every request frame is ``[request id (8 bytes), payload]``; the reply repeats the request id.
Each request has exactly one reply, ``Failed`` if it could not be served. Every message about
a policy names its adapter.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from areal_lora.types import TrajectoryGroup

PROTOCOL = 2


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the class name travels as the tag."""


# ---------------------------------------------------------------- trainer -> controller


class Hello(Message, frozen=True):
    """A trainer (re)starts: nothing is issued until it announces a version. Reply: Welcome."""

    protocol: int = PROTOCOL


class AnnounceVersion(Message, frozen=True):
    """``adapter@v{version}`` is active on ``servers`` (data-plane URL by name) and nowhere else. Reply: Done.

    ``lost`` are servers given up since the last announcement. The first announcement also names
    the next step; the newest version may be announced again, with other servers.
    """

    adapter: str
    version: int
    servers: dict[str, str]
    lost: tuple[str, ...] = ()


class GetBatch(Message, frozen=True):
    """Long poll for the groups of ``step``, consumed at ``version``. Reply: Batch or NotReady.

    Asking for step s says that every step before s is committed. Asking again for the step
    served last gives the same batch.
    """

    adapter: str
    step: int
    version: int
    timeout_s: float


class Evaluate(Message, frozen=True):
    """Start a greedy evaluation of ``adapter@v{version}`` in the background. Reply: Done."""

    adapter: str
    version: int
    tag: str


class GetEvents(Message, frozen=True):
    """Long poll for evaluation results not yet delivered. Reply: Events (empty after ``timeout_s``)."""

    adapter: str
    timeout_s: float = 0.0


class GetStats(Message, frozen=True):
    """Reply: Stats."""

    adapter: str


class Shutdown(Message, frozen=True):
    """End the controller. Reply: Done."""


# ---------------------------------------------------------------- controller -> trainer


class Welcome(Message, frozen=True):
    adapters: tuple[str, ...]
    protocol: int = PROTOCOL


class Done(Message, frozen=True):
    pass


class Failed(Message, frozen=True):
    reason: str


class Stats(Message, frozen=True):
    """Counters of one adapter since the controller started; groups unless the name says otherwise.

    ``issued = consumed + leased + ready + running + sum(dropped)``; ``running`` includes
    groups that wait for a retry.
    """

    newest_version: int
    ready: int
    running: int
    leased: int
    issued: int
    consumed: int
    dropped: dict[str, int]
    retried: dict[str, int]
    staleness: dict[int, int]  # consume version - oldest token version, at hand-over
    tokens_generated: int
    idle_s: float  # nothing in flight
    generation_s: float  # summed over finished groups


class RolloutSample(msgspec.Struct, frozen=True, kw_only=True):
    """A readable example for reports."""

    uid: str
    prompt: str
    completion: str
    answer: str
    reward: float
    version: int


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy accuracy over ``n`` problems; ``error`` is set, and ``n`` is 0, if it could not be measured."""

    adapter: str
    version: int
    tag: str
    accuracy: float
    n: int
    wall_s: float
    samples: tuple[RolloutSample, ...] = ()
    error: str = ""


class Batch(Message, frozen=True):
    """The groups of one step, oldest issue first; ``events`` are evaluation results not yet delivered."""

    adapter: str
    step: int
    groups: tuple[TrajectoryGroup, ...]
    stats: Stats
    samples: tuple[RolloutSample, ...]
    events: tuple[EvalResult, ...]


class NotReady(Message, frozen=True):
    """No full batch within the poll's time-out."""

    ready: int
    needed: int
    running: int
    dropped: int
    note: str = ""


class Events(Message, frozen=True):
    events: tuple[EvalResult, ...]


Request: TypeAlias = Hello | AnnounceVersion | GetBatch | Evaluate | GetEvents | GetStats | Shutdown
Reply: TypeAlias = Welcome | Done | Failed | Stats | Batch | NotReady | Events

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode

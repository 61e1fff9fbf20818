"""Messages between trainer and controller, tagged msgspec structs over zmq, and the controller's socket for them.

Every request frame is ``[request id (8 bytes), payload]``; the reply repeats the request id. Each request has exactly
one reply, ``ErrorReply`` if it could not be served. Every message about a policy names its adapter.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from areal_lora.errors import ArealLoraError, ExitCode
from areal_lora.network.rpc import FRAME_BYTES, Listener, Wire
from areal_lora.obs.metrics.records import DroppedGroup, EvalRecord, GroupText
from areal_lora.processes.log import get_logger
from areal_lora.rollout.ledger.ledger import LedgerError
from areal_lora.types import AdapterRef, TrajectoryGroup

PROTOCOL = 16
WIRE = Wire(
    server="controller",
    client="trainer",
    max_request_bytes=FRAME_BYTES,  # a greeting with snapshots has 8 bytes of each prompt that has a solved share
    max_reply_bytes=FRAME_BYTES,  # a batch, with routes 392 bytes a token, is as long as its step
)

log = get_logger(__name__)


class ChannelMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the class name travels as the tag."""


# ---------------------------------------------------------------- trainer -> controller


class Hello(ChannelMessage, frozen=True):
    """Open a session. Reply: Welcome, whose ``session`` every later request carries.

    ``versions`` are by adapter the next version to consume at. A ``trainer`` (random, one per process) not seen before
    has loaded them from its checkpoints: what was consumed or leased at or after them is undone. A known trainer greets
    a restarted controller: nothing is undone. ``snapshots`` are the newest the trainer holds (``Batch.snapshot``), for
    a controller whose ledger is lost. All are of the configuration's adapters; others join again after it.
    """

    trainer: str
    versions: dict[str, int]
    snapshots: dict[str, bytes]
    protocol: int = PROTOCOL


class SessionMessage(ChannelMessage, frozen=True):
    """Base of all requests but Hello. Reply to a ``session`` that has ended: StaleSession."""

    session: str = ""


class AnnounceVersion(SessionMessage, frozen=True, kw_only=True):
    """``adapter@v{version}`` is active on ``servers`` (data-plane URL by name) and nowhere else. Reply: Ack.

    Since the previous announcement ``lost`` were excluded, and ``left`` have left in order: they end what they run.
    The newest version may be announced again, with other servers.
    """

    adapter: str
    version: int
    servers: dict[str, str]
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class GetBatch(SessionMessage, frozen=True, kw_only=True):
    """Long poll for a batch of the first of ``wanted`` that has one, to be consumed at that version.

    Reply: Batch, AdapterFailed or NotReady.

    A step that is not committed is served again unchanged. NotReady comes before ``timeout_s`` where evaluation
    results wait to be delivered; with nothing wanted the request waits for these only.
    """

    wanted: tuple[AdapterRef, ...]
    timeout_s: float


class CommitStep(SessionMessage, frozen=True, kw_only=True):
    """A checkpoint that contains ``step`` and all steps before it is durable. Idempotent. Reply: Ack."""

    adapter: str
    step: int


class Evaluate(SessionMessage, frozen=True, kw_only=True):
    """Start an evaluation of ``adapter@v{version}`` on all its sets, in the background. Reply: Ack.

    Idempotent while the evaluation runs, or its result waits to be fetched.
    """

    adapter: str
    version: int
    tag: str


class JoinAdapter(SessionMessage, frozen=True, kw_only=True):
    """An adapter that the configuration does not list starts at ``version``: ``config`` is its entry as JSON.

    ``snapshot`` is that of its checkpoint. Of one that has joined only ``paused`` counts: whether groups are issued.
    Reply: Ack, or AdapterFailed if nothing can be rolled out for it.
    """

    adapter: str
    config: bytes
    version: int
    snapshot: bytes = b""
    paused: bool = False


class EndAdapter(SessionMessage, frozen=True, kw_only=True):
    """Nothing more is needed of ``adapter`` in this session: issue no groups, drop those in flight. Reply: Ack.

    One that has joined is forgotten.
    """

    adapter: str


class Shutdown(SessionMessage, frozen=True, kw_only=True):
    """End the controller. Reply: Ack."""


# ---------------------------------------------------------------- controller -> trainer


class Welcome(ChannelMessage, frozen=True):
    """``session`` identifies one controller process in contact with one trainer process."""

    session: str


class StaleSession(ChannelMessage, frozen=True):
    """The request carries another session: the controller was restarted, or another trainer has greeted it."""


class Ack(ChannelMessage, frozen=True):
    pass


class ErrorReply(ChannelMessage, frozen=True):
    reason: str


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one adapter since the start of the run; groups unless the name differs.

    ``running`` includes groups that wait for a retry. ``reissued`` is part of ``dropped``.
    """

    ready: int
    running: int
    leased: int
    issued: int
    consumed: int
    dropped: dict[str, int]
    reissued: int  # issues of a prompt after its first
    retried: dict[str, int]
    late: int  # answers to requests that were abandoned or answered before
    tokens_generated: int
    idle_s: float  # nothing in flight
    ahead: int  # this and the next two: see `controller.pacing.Pacer`
    margin_s: float
    spare_s: float | None
    faults: dict[str, str] = {}  # the last one of each kind in this process


class GroupSums(msgspec.Struct, kw_only=True):
    """Sums over the groups answered since the previous batch, those dropped included, without those of given answers.

    ``equal`` groups have equal rewards. Correctness is known of every answer of ``judged`` groups.
    """

    groups: int = 0
    equal: int = 0
    judged: int = 0
    all_right: int = 0
    all_wrong: int = 0
    samples: int = 0
    reward: float = 0.0

    def add(self, group: TrajectoryGroup) -> None:
        if any(t.given for t in group.trajectories):
            return
        # The trajectories of one sample have its one reward.
        rewards = {t.sample: t.reward for t in group.trajectories}
        correct = {t.correct for t in group.trajectories}
        self.groups += 1
        self.equal += len(set(rewards.values())) == 1
        self.judged += None not in correct
        self.all_right += correct == {True}
        self.all_wrong += correct == {False}
        self.samples += len(rewards)
        self.reward += sum(rewards.values())


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation requested of ``adapter@v{version}``: the sets in the order of the configuration.

    The records are of a newer version if no server held that one any more. ``failed`` has the reasons of those without
    a record, by name. ``retired``: for some of them no server held the version.
    """

    adapter: str
    version: int
    tag: str
    sets: tuple[EvalRecord, ...]
    failed: dict[str, str] = {}
    retired: bool = False


class Batch(ChannelMessage, frozen=True):
    """The groups of one step, oldest issue first; ``texts`` are theirs, and ``dropped`` the last groups dropped since
    the step before, or none where no rollout is kept. ``events`` are evaluation results, of any adapter, that are not
    delivered yet.

    A restarted controller has empty ``sampled`` for a batch that it serves again.
    ``snapshot`` is the ledger as it will be once this step is consumed: opaque, for the checkpoint.
    ``reward_components`` are means of the reward's parts, each over the batch's samples that name it.
    ``reward_costs`` is what the rewards spent since the previous batch, also for evaluations and dropped groups.
    ``moved`` has, by adapter, a requested version that no server held any more, and the one measured in its place.
    """

    adapter: str
    step: int
    groups: tuple[TrajectoryGroup, ...]
    stats: Stats
    texts: tuple[GroupText, ...]
    events: tuple[EvalResult, ...]
    snapshot: bytes
    sampled: GroupSums = msgspec.field(default_factory=GroupSums)
    reward_components: dict[str, float] = {}
    reward_costs: dict[str, float] = {}
    dropped: tuple[DroppedGroup, ...] = ()
    moved: dict[str, tuple[int, int]] = {}

    def recorded(self) -> "Batch":
        """See `TrajectoryGroup.recorded`. Dropped groups come so."""
        return msgspec.structs.replace(self, groups=tuple(group.recorded() for group in self.groups))


class Lacking(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch of ``adapter`` lacks, in groups; ``note`` names a likely reason."""

    adapter: str
    ready: int
    needed: int
    running: int
    dropped: int
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.adapter} {self.ready}/{self.needed} groups ready, {self.running} running, {self.dropped} dropped"
        return f"{text}; {self.note}" if self.note else text


class NotReady(ChannelMessage, frozen=True):
    """No full batch of a wanted adapter; ``events`` and ``moved`` are those of `Batch`."""

    lacking: tuple[Lacking, ...]
    events: tuple[EvalResult, ...] = ()
    moved: dict[str, tuple[int, int]] = {}


class AdapterFailed(ChannelMessage, frozen=True):
    """The rollouts of ``adapter`` have ended with an error of ``exit_code``; those of the others continue."""

    adapter: str
    reason: str
    exit_code: int = ExitCode.TEMPORARY


SessionRequest: TypeAlias = AnnounceVersion | GetBatch | CommitStep | Evaluate | JoinAdapter | EndAdapter | Shutdown
Request: TypeAlias = Hello | SessionRequest
Reply: TypeAlias = Welcome | StaleSession | Ack | ErrorReply | Batch | NotReady | AdapterFailed
Handler: TypeAlias = Callable[[Request], Awaitable[Reply]]

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


# ---------------------------------------------------------------- the controller's socket


class ControlSocket:
    """Answers each request in its own task, so that a long poll delays no other request."""

    def __init__(self, host: str, secret: str) -> None:
        self._listener = Listener(host, secret, WIRE)
        self.port = self._listener.port

    async def serve(self, handler: Handler, tasks: asyncio.TaskGroup) -> None:
        """Receive until cancelled. ArealLoraError becomes an ErrorReply; LedgerError and others end the task group."""
        while True:
            client, *frames = await self._listener.socket.recv_multipart()
            if len(frames) > 1:
                tasks.create_task(self._answer(handler, client, frames[0], b"".join(frames[1:])))

    async def _answer(self, handler: Handler, client: bytes, request_id: bytes, payload: bytes) -> None:
        reply: Reply
        try:
            reply = await handler(decode_request(payload))
        except msgspec.DecodeError as error:
            reply = ErrorReply(reason=f"request is not understood: {error}")
        except LedgerError:
            raise  # no request may be answered from an inconsistent ledger
        except ArealLoraError as error:
            log.error("request refused: %s", error)
            reply = ErrorReply(reason=str(error))
        await self._listener.reply(client, request_id, encode(reply))

    def close(self) -> None:
        self._listener.close(linger_s=0.5)

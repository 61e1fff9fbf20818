"""Rank 0's decisions about a publish, as pure functions: what follows from the answers of servers and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import msgspec

from areal_lora.algorithms.merging import CastSums
from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, ParityError, PublishError, RefusalReason
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply, ServerEndpoint
from areal_lora.weight_sync.trainer.membership import Judgement, ServerFinding, judge


class ServerAck(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledgement of one server: the digest of what it serves."""

    server: ServerEndpoint
    digest: str


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """A completed publish: ``acks`` of the servers that serve the version, reasons for those that were ``lost``.

    ``joined`` became members in it, ``left`` left in order since the last one.

    ``phases`` in milliseconds: ``pack`` (main threads) and ``send`` (publisher threads) of the slowest
    rank, ``ack`` from the call of ``publish`` to the last acknowledgement, ``probe`` after it; the
    slowest server's ``wire``, ``verify``, ``write``, ``commit`` and its further phases.
    ``attempts`` is 1 unless servers were lost or a transfer was repeated. ``differs``: every server
    scores the probe differently from its base; None without a probe. ``cast``: what the cast to the serving dtype
    leaves of a merged adapter; None for one that is not merged.
    """

    ref: AdapterRef
    digest: str
    nbytes: int
    phases: dict[str, float]
    acks: list[ServerAck]
    lost: dict[str, str] = {}
    joined: list[str] = []
    left: list[str] = []
    attempts: int = 1
    probe_mean_abs: float | None = None
    probe_max_abs: float | None = None
    differs: bool | None = None
    cast: CastSums | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a form that every rank can raise."""

    kind: str
    reason: str = ""
    message: str = ""

    @classmethod
    def of(cls, e: ArealLoraError) -> Failure:
        if isinstance(e, ManifestError):
            return cls(kind="refused", reason=e.reason, message=e.detail)
        kind = "parity" if isinstance(e, ParityError) else "adapter" if isinstance(e, AdapterError) else "failed"
        return cls(kind=kind, message=str(e))

    def error(self) -> ArealLoraError:
        if self.kind == "refused":
            return ManifestError(self.reason, self.message)
        return {"parity": ParityError, "adapter": AdapterError}.get(self.kind, PublishError)(self.message)


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one attempt at one rank. ``sum`` is the ``seal.shard_sum`` of the rank's shard.

    ``own`` is a failure that another attempt cannot repair, ``wire`` a failure of the transfer.
    ``cast``: what the cast to the serving dtype leaves of this rank's part of the adapter.
    """

    ref: AdapterRef
    layout: str
    sum: int = 0
    pack_ms: float = 0.0
    send_ms: float = 0.0
    own: Failure | None = None
    wire: Failure | None = None
    cast: CastSums | None = None


class FinishPublish(msgspec.Struct, frozen=True, tag=True):
    """The version serves: end the publish with ``report``."""

    report: PublishReport


class Fail(msgspec.Struct, frozen=True, tag=True):
    """End the publish with ``failure``. ``intact``: all members are in step, and the groups serve the next publish."""

    failure: Failure
    intact: bool = False


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Too few servers remain, or one has no free adapter slot: restart the deadline and take another step."""


class Attempt(msgspec.Struct, frozen=True, tag=True):
    """Send the version; first form new groups with ``members``, unless it is None."""

    members: list[ServerEndpoint] | None = None


class Yield(msgspec.Struct, frozen=True, tag=True):
    """Wait, and let publish ``number``, of another adapter, go ahead meanwhile."""

    number: int


Step = FinishPublish | Fail | Wait | Yield | Attempt


class Decision(msgspec.Struct, frozen=True):
    """Rank 0's next step for all ranks, and the remaining time of the publish (``Budget.left_s``)."""

    step: Step
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of one publish; times are time.monotonic.

    ``short_since``: fewer than ``min_servers`` members remain. ``full_since``: a member has no free adapter slot.
    """

    attempts: int = 1
    short_since: float | None = None
    full_since: float | None = None


class Look(Enum):
    """Next action after a search for servers."""

    CONNECT = auto()
    LOOK = auto()  # again, after a pause
    WAIT = auto()  # let all ranks take a step, then look again
    STOP = auto()


class Move(Enum):
    """Next action after an attempt."""

    FINISH = auto()
    AWAIT_SLOT = auto()
    RETRY = auto()
    STOP = auto()


def after_look(
    progress: Progress,
    able: int,
    *,
    started: float,
    now: float,
    until: float,
    config: WeightSyncConfig,
    min_servers: int,
    watched: bool,
    loading: bool = False,
) -> tuple[Progress, Look]:
    """Connect if ``able`` servers suffice, else wait up to ``rejoin_s`` for others if servers are ``watched``.

    The time starts when no server is ``loading`` any more. The look started at ``started``; it is ``now``; all ranks
    take a step at ``until``.
    """
    if able >= min_servers:
        return replace(progress, short_since=None), Look.CONNECT
    since = now if loading else started if progress.short_since is None else progress.short_since
    progress = replace(progress, short_since=since)
    if not watched or now >= since + config.rejoin_s:
        return progress, Look.STOP
    return progress, Look.WAIT if now >= until else Look.LOOK


def check_results(ref: AdapterRef, layout: str, results: Sequence[Sent]) -> None:
    """Raise what no further attempt can repair: a rank's own error, another publish at a rank, a refused transfer."""
    for rank, sent in enumerate(results):
        if sent.own is not None:
            raise sent.own.error()
        if (sent.ref, sent.layout) != (ref, layout):
            raise PublishError(
                f"trainer rank {rank} publishes {sent.ref} with layout {sent.layout} while rank 0 publishes {ref} "
                f"with {layout}"
            )
        if sent.wire is not None and sent.wire.kind != "failed":
            raise sent.wire.error()


def sent_in_step(ref: AdapterRef, layout: str, results: Sequence[Sent]) -> bool:
    """Whether all ranks have sent the version whole: the receivers can take another one in the same groups."""
    return all(sent.own is None and sent.wire is None and (sent.ref, sent.layout) == (ref, layout) for sent in results)


def member_findings(
    members: Iterable[ServerEndpoint],
    replies: Mapping[ServerEndpoint, PublishReply],
    errors: Mapping[ServerEndpoint, ArealLoraError],
    *,
    ref: AdapterRef,
    digest: str,
    results: Sequence[Sent],
) -> list[ServerFinding]:
    """Which members serve ``ref`` with the numbers of ``digest``, and the errors of the others.

    ``leftover`` is set where the member holds versions that this trainer did not make.
    """
    findings = []
    for server in members:
        reply, error, foreign = replies.get(server), errors.get(server), False
        if error is not None:
            foreign = isinstance(error, ManifestError) and error.reason == RefusalReason.STALE_VERSION
        elif reply is None:
            error = PublishError(f"{ref} was not sent: {what_failed((), results)}")
        elif (reply.ref, reply.digest) != (str(ref), digest):
            text = (
                f"server {server} acknowledged {reply.ref} {reply.digest}, published was {ref} {digest}; "
                "it serves other numbers than were sent"
            )
            error, foreign = ManifestError(RefusalReason.HASH, text), True
        findings.append(ServerFinding(server=server, error=error, leftover=foreign))
    return findings


def judged(
    progress: Progress, findings: Sequence[ServerFinding], *, now: float, timeout_s: float
) -> tuple[Progress, Judgement]:
    """Judge an attempt; a member that was full for ``timeout_s`` is late. Raises the error of a member that refuses."""
    full_since = progress.full_since
    if not any(f.full for f in findings):
        full_since = None
    elif full_since is None:
        full_since = now
    late = full_since is not None and now >= full_since + timeout_s
    return replace(progress, full_since=full_since), judge(findings, retried=progress.attempts > 1, late=late)


def after_attempt(
    progress: Progress,
    findings: Sequence[ServerFinding],
    judgement: Judgement,
    *,
    remaining: int,
    left_s: float,
    config: WeightSyncConfig,
    min_servers: int,
) -> tuple[Progress, Move]:
    """Finish if all ``remaining`` members serve the version and suffice, else wait or retry.

    Running requests hold their versions' slots until they end: a full server takes no attempt away from the others.
    No transfer starts when ``left_s`` is shorter than a ping.
    """
    if judgement.complete and remaining >= min_servers:
        return progress, Move.FINISH
    if any(f.full for f in findings):
        excluded = any(f.full and f.server in judgement.lost for f in findings)
        broken = any(f.error is not None and not f.full for f in findings)
        full_since = None if excluded else progress.full_since  # a server that returns is waited for as long
        return replace(progress, full_since=full_since, attempts=progress.attempts + broken), Move.AWAIT_SLOT
    if left_s < config.ping_s:
        return progress, Move.STOP
    return replace(progress, attempts=progress.attempts + 1), Move.RETRY


def what_failed(findings: Sequence[ServerFinding], results: Sequence[Sent]) -> str:
    """Text of the servers' errors; of the trainer ranks' transfer errors only if no server has one."""
    servers = [f"{f.server.name}: {f.error}" for f in findings if f.error is not None]
    ranks = [f"trainer rank {rank}: {sent.wire.message}" for rank, sent in enumerate(results) if sent.wire is not None]
    return "; ".join(servers or ranks)

"""Rank 0's decisions about a publish, as pure functions: what follows from the answers of servers and ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from areal_lora.algorithms.merging import CastSums
from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, ParityError, PublishError, RefusalReason
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.link.relays import RelayGroup
from areal_lora.weight_sync.messages import PublishReply, ServerEndpoint, listed
from areal_lora.weight_sync.trainer.membership import Judgement, ServerFinding, judge


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """A completed publish: ``ref`` serves, and passed its probe, on exactly ``servers``.

    ``joined`` became members in it. Since the last report ``lost`` were excluded (reasons by name), and ``left`` have
    left in order: they still end what they run.

    ``phases`` in milliseconds: ``pack`` (or merge) and ``send`` (publisher threads) of the slowest rank, ``ack``
    from the call of ``publish`` to the last acknowledgement, ``probe`` after it; the slowest server's ``wire``,
    ``verify``, ``write``, ``commit`` and its further phases. ``attempts`` is 1 unless servers were lost or a transfer
    was repeated. ``differs``: every server scores the probe differently from its base; None without a probe. ``cast``:
    what the cast to the serving dtype leaves of a merged adapter; None for one that is not merged.
    """

    ref: AdapterRef
    digest: str
    nbytes: int
    phases: dict[str, float]
    servers: tuple[ServerEndpoint, ...]
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
    def of(cls, e: ArealLoraError) -> "Failure":
        if isinstance(e, ManifestError):
            return cls(kind="refused", reason=e.reason, message=e.detail)
        kind = "parity" if isinstance(e, ParityError) else "adapter" if isinstance(e, AdapterError) else "failed"
        return cls(kind=kind, message=str(e))

    def error(self) -> ArealLoraError:
        if self.kind == "refused":
            return ManifestError(self.reason, self.message)
        return {"parity": ParityError, "adapter": AdapterError}.get(self.kind, PublishError)(self.message)


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one attempt at one rank. ``sum`` is the `manifest.shard_sum` of the rank's shard.

    ``own`` is a failure that another attempt cannot repair, ``wire`` one of the transfer; ``cast`` of this rank's part.
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
    """Send the version; first replace ``groups``, with one for each of the ``sources`` (ranks).

    One without members ends what its relay sends on. ``shared``: the sources' group is the only one.
    """

    groups: list[RelayGroup] = []
    sources: list[int] = []
    shared: bool = True


class Yield(msgspec.Struct, frozen=True, tag=True):
    """Wait, and let publish ``number``, of another adapter, go ahead meanwhile."""

    number: int


Step = FinishPublish | Fail | Wait | Yield | Attempt


class Decision(msgspec.Struct, frozen=True):
    """Rank 0's next step for all ranks, and the remaining time of the publish (`Budget`)."""

    step: Step
    left_s: float
    form_left_s: float


class Move(Enum):
    """Next action after an attempt."""

    FINISH = auto()
    AWAIT_SLOT = auto()
    RETRY = auto()
    STOP = auto()


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of one publish; times are time.monotonic.

    ``short_since``: fewer than ``min_servers`` members remain. ``full_since``: a member has no free adapter slot.
    ``broken``: the servers that were so after the last attempt.
    """

    attempts: int = 1
    short_since: float | None = None
    full_since: float | None = None
    broken: frozenset[ServerEndpoint] = frozenset()

    def short_for(self, started: float, now: float, *, loading: bool) -> float:
        """Seconds for which too few servers remain, in a look that ``started``; 0 while a server is ``loading``."""
        if loading or self.short_since is None:
            self.short_since = now if loading else started
        return now - self.short_since

    def judge(self, findings: Sequence[ServerFinding], *, now: float, timeout_s: float) -> Judgement:
        """Judge an attempt; a member that was full for ``timeout_s`` is late. Raises the error of one that refuses."""
        if not any(f.full for f in findings):
            self.full_since = None
        elif self.full_since is None:
            self.full_since = now
        late = self.full_since is not None and now >= self.full_since + timeout_s
        before, self.broken = self.broken, frozenset(f.server for f in findings if f.broken)
        return judge(findings, retried=self.attempts > 1, before=before, late=late)

    def move(
        self, findings: Sequence[ServerFinding], judgement: Judgement, *, enough: bool, left_s: float, ping_s: float
    ) -> Move:
        """Finish if all remaining members serve the version and are ``enough``, else wait or retry.

        Running requests hold their versions' slots until they end: a full server takes no attempt away from the others.
        No transfer starts when ``left_s`` is shorter than a ping.
        """
        if judgement.complete and enough:
            return Move.FINISH
        if any(f.full for f in findings):
            if any(f.full and f.server in judgement.lost for f in findings):
                self.full_since = None  # a server that returns is waited for as long
            self.attempts += any(f.error is not None and not f.full for f in findings)
            return Move.AWAIT_SLOT
        if left_s < ping_s:
            return Move.STOP
        self.attempts += 1
        return Move.RETRY


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


def member_findings(
    members: Iterable[ServerEndpoint],
    replies: Mapping[ServerEndpoint, PublishReply],
    errors: Mapping[ServerEndpoint, ArealLoraError],
    *,
    ref: AdapterRef,
    digest: str,
    results: Sequence[Sent],
) -> list[ServerFinding]:
    """Which members serve ``ref`` with the numbers of ``digest``, and the errors of the others."""
    findings = []
    for server in members:
        reply, error = replies.get(server), errors.get(server)
        unsent = error is None and reply is None
        if unsent:
            error = PublishError(f"{ref} was not sent: {what_failed((), results)}")
        elif reply is not None and (reply.ref, reply.digest) != (str(ref), digest):
            text = (
                f"server {server} acknowledged {reply.ref} {reply.digest}, published was {ref} {digest}; "
                "it serves other numbers than were sent"
            )
            error = ManifestError(RefusalReason.HASH, text)
        findings.append(ServerFinding(server=server, error=error, unsent=unsent))
    return findings


def what_failed(findings: Sequence[ServerFinding], results: Sequence[Sent]) -> str:
    """Text of the first errors of servers, those that do not answer first, and of the trainer ranks' transfers.

    One dead server ends the transfer of all others of its group; a source names receivers that are missing.
    """
    failed = sorted((f for f in findings if f.error is not None), key=lambda f: f.alive)
    servers = [f"{f.server.name}: {f.error}" for f in failed]
    ranks = [f"trainer rank {rank}: {sent.wire.message}" for rank, sent in enumerate(results) if sent.wire is not None]
    return "; ".join(listed(texts, "; ") for texts in (servers, ranks) if texts)

"""What a publish reports, and what trainer ranks tell each other about it (msgpack between ranks)."""

from __future__ import annotations

import msgspec

from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, ParityError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import ServerEndpoint


class ServerAck(msgspec.Struct, frozen=True, kw_only=True):
    """One server's acknowledgement; ``probe_*`` are |logp trainer - logp server|, None without a probe."""

    server: ServerEndpoint
    digest: str
    phases: dict[str, float]
    probe_mean_abs: float | None = None
    probe_max_abs: float | None = None
    differs: bool | None = None


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """A completed publish: ``acks`` are the servers that serve the version, ``lost`` says why others do not.

    ``phases`` in milliseconds: ``pack`` (main threads) and ``send`` (publisher threads) of the slowest
    rank, ``ack`` from the call of ``publish`` to the last acknowledgement, ``probe`` after it; the
    slowest server's ``wire``, ``verify``, ``write``, ``commit`` and whatever else it reports.
    ``attempts`` is 1 unless servers were lost or a transfer was repeated. ``differs`` says whether
    every server scores the probe differently from its base, None without a probe.
    """

    ref: AdapterRef
    digest: str
    nbytes: int
    phases: dict[str, float]
    acks: list[ServerAck]
    lost: dict[str, str] = {}
    attempts: int = 1
    probe_mean_abs: float | None = None
    probe_max_abs: float | None = None
    differs: bool | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a form that every rank can raise again."""

    kind: str
    reason: str = ""
    message: str = ""

    @classmethod
    def of(cls, e: ArealLoraError) -> Failure:
        if isinstance(e, ManifestError):
            return cls(kind="refused", reason=e.reason, message=e.detail)
        if isinstance(e, ParityError):
            return cls(kind="parity", message=str(e))
        return cls(kind="adapter" if isinstance(e, AdapterError) else "failed", message=str(e))

    def error(self) -> ArealLoraError:
        match self.kind:
            case "refused":
                return ManifestError(self.reason, self.message)
            case "parity":
                return ParityError(self.message)
            case "adapter":
                return AdapterError(self.message)
        return PublishError(self.message)


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt went at one rank. ``sum`` is its shard's ``seal.shard_sum``.

    ``own`` is a failure that no other attempt can mend, ``wire`` one of the transfer.
    """

    ref: AdapterRef
    layout: str
    sum: int = 0
    pack_ms: float = 0.0
    send_ms: float = 0.0
    own: Failure | None = None
    wire: Failure | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 has all ranks do next: end with ``failure`` or ``report``, wait, or make an attempt.

    ``connect`` lists the servers that new groups are to be made with; None keeps the groups. With
    ``wait`` too few servers are left, or one has no free adapter slot: the publish's deadline begins anew, and
    another step follows. ``left_s`` is when the publish is over at the latest, as rank 0 counts: all ranks wait for
    each other by that.
    """

    wait: bool = False
    connect: list[ServerEndpoint] | None = None
    report: PublishReport | None = None
    failure: Failure | None = None
    left_s: float = 0.0

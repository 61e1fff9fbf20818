"""What a publish reports, and what trainer ranks tell each other about it (msgpack between ranks)."""

from __future__ import annotations

import msgspec

from areal_lora.errors import ArealLoraError, ManifestError, ParityError, PublishError
from areal_lora.types import AdapterRef, AdapterShard


class ServerAck(msgspec.Struct, frozen=True, kw_only=True):
    """One server's acknowledgement; ``probe_*`` are |logp trainer - logp server|, None without a probe."""

    server: str
    digest: str
    phases: dict[str, float]
    probe_mean_abs: float | None = None
    probe_max_abs: float | None = None


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """A completed publish. ``phases`` in milliseconds: ``pack``, ``manifest`` (this trainer's main
    threads), ``send`` and ``ack`` (background), ``wire``, ``verify``, ``write``, ``commit`` (the slowest
    server), ``probe``."""

    ref: AdapterRef
    digest: str
    nbytes: int
    phases: dict[str, float]
    acks: list[ServerAck]
    probe_mean_abs: float | None = None
    probe_max_abs: float | None = None


class Failure(msgspec.Struct, kw_only=True):
    """An error in a form that every rank can raise again."""

    kind: str
    reason: str = ""
    message: str = ""

    @classmethod
    def of(cls, e: ArealLoraError) -> Failure:
        if isinstance(e, ManifestError):
            return cls(kind="refused", reason=e.reason, message=e.detail)
        return cls(kind="parity" if isinstance(e, ParityError) else "failed", message=str(e))

    def error(self) -> ArealLoraError:
        if self.kind == "refused":
            return ManifestError(self.reason, self.message)
        return ParityError(self.message) if self.kind == "parity" else PublishError(self.message)


class Part(msgspec.Struct, kw_only=True):
    """What one rank brings to the manifest."""

    ref: AdapterRef
    shard: AdapterShard | None
    aliases: dict[str, str]
    pack_ms: float
    failure: Failure | None = None


class Outcome(msgspec.Struct, kw_only=True):
    """How the background part of one rank ended. Only rank 0 has a report."""

    send_ms: float = 0.0
    failure: Failure | None = None
    report: PublishReport | None = None

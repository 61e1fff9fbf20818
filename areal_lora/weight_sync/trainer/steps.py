"""Messages between trainer ranks during a publish (msgpack): results of an attempt, and rank 0's next step."""

from __future__ import annotations

import msgspec

from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, ParityError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.trainer.report import PublishReport


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a form that every rank can raise."""

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
    """Result of one attempt at one rank. ``sum`` is the ``seal.shard_sum`` of the rank's shard.

    ``own`` is a failure that another attempt cannot repair, ``wire`` a failure of the transfer.
    """

    ref: AdapterRef
    layout: str
    sum: int = 0
    pack_ms: float = 0.0
    send_ms: float = 0.0
    own: Failure | None = None
    wire: Failure | None = None


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The version serves: end the publish with ``report``."""

    report: PublishReport


class Fail(msgspec.Struct, frozen=True, tag=True):
    """End the publish with ``failure``."""

    failure: Failure


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Too few servers remain, or one has no free adapter slot: restart the deadline and take another step."""


class Attempt(msgspec.Struct, frozen=True, tag=True):
    """Send the version; first form new groups with ``members``, unless it is None."""

    members: list[ServerEndpoint] | None = None


Step = Finish | Fail | Wait | Attempt


class Decision(msgspec.Struct, frozen=True):
    """Rank 0's next step for all ranks, and the remaining time of the publish (``Budget.left_s``)."""

    step: Step
    left_s: float


def raise_on_all(exchange: Exchange, failure: Failure | None, timeout_s: float | None = None) -> None:
    """Raise the first rank's ``failure`` on every rank (collective)."""
    for raw in exchange.all_gather_bytes(msgspec.msgpack.encode(failure), timeout_s):
        if (failed := msgspec.msgpack.decode(raw, type=Failure | None)) is not None:
            raise failed.error()

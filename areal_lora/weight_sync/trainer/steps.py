"""Messages between trainer ranks during a publish (msgpack): results of an attempt, and rank 0's next step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from areal_lora.algorithms.merging import CastSums
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


def agree(exchange: Exchange, failure: Failure | None, timeout_s: float | None = None) -> Failure | None:
    """Return the first rank's ``failure`` on every rank; None if no rank has one (collective)."""
    gathered = exchange.all_gather_bytes(msgspec.msgpack.encode(failure), timeout_s)
    failures = (msgspec.msgpack.decode(raw, type=Failure | None) for raw in gathered)
    return next((failed for failed in failures if failed is not None), None)


def total_cast(results: Sequence[Sent]) -> CastSums | None:
    """The sums of all ranks; None where no rank casts."""
    casts = [sent.cast for sent in results if sent.cast is not None]
    total = CastSums()
    for cast in casts:
        total.include(cast)
    return total if casts else None

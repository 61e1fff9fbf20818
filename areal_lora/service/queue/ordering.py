"""In which order what arrives is carried out, and what the trainer is sent of it. Pure.

    arrivals   3 2 1 4      any order, some twice          held until all before it are there
    seq        1 2 3 4      the client's, may have gaps    a gap is sealed after `GAP_S`
    number     1 2 3 4 5    the queue's, without gaps       what the trainer sees

A save for a sampler is two operations of one seq; a sealed gap is one `Poison`, however many are missing.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from itertools import count, takewhile
from typing import NamedTuple

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import Pass, Poison, What, ends_window
from areal_lora.service.queue.queue_rows import Quota

GAP_S = 360.0  # clients repeat a request for up to five minutes
AHEAD = 16
"""Operations of an adapter from the first one without an outcome on that the trainer is sent."""


class OpKind(StrEnum):
    """``close``: it ends a window and makes a version, whose checkpoint covers it and all before it."""

    PASS = "pass"
    CLOSE = "close"
    OTHER = "other"


class Op(NamedTuple):
    """An operation that the trainer may still expect, without its body; ``failed`` None: it has no outcome."""

    number: int
    kind: OpKind
    failed: bool | None


class QueueUsage(NamedTuple):
    """What a tenant has in its queue: unanswered requests, and bytes that the queue has to keep."""

    queued: int
    n_bytes: int


def kind_of(what: What) -> OpKind:
    if ends_window(what):
        return OpKind.CLOSE
    return OpKind.PASS if isinstance(what, Pass | Poison) else OpKind.OTHER


def check_seq(quota: Quota, next_seq: int, seq: int) -> None:
    """Raises RequestError for a new ``seq`` that cannot be carried out, or only after more requests than may wait."""
    if seq < next_seq:
        reason = f"{seq} was passed over, or answered long ago; the next one is {next_seq}"
        raise RequestError("seq_id", reason, "count requests of a model from 1, and send each one within minutes")
    if seq >= next_seq + quota.queued:
        reason = f"{seq} is too far ahead of {next_seq}, the next one that can be carried out"
        raise RequestError("seq_id", reason, "send the ones before it first", status=429)


def admit(quota: Quota, waiting: QueueUsage, held: Collection[int], seq: int, n_bytes: int) -> None:
    """Whether a request with a new ``seq`` may wait. Raises RequestError.

    What fills a gap before a request that is held is taken above the number of requests: else the queue could never
    become shorter. A request without data is taken above the number of bytes: only a step makes these fewer.
    """
    if waiting.queued >= quota.queued and not any(seq < later for later in held):
        reason = f"{quota.queued} requests wait, and that is the quota"
        raise RequestError("requests", reason, "wait until some are answered", status=429)
    if reason := too_long(quota, waiting, n_bytes):
        raise RequestError("requests", reason, "wait until some are answered", status=429)


def too_long(quota: Quota, waiting: QueueUsage, n_bytes: int) -> str:
    """Why a request with so many bytes of data cannot be kept; empty if it can."""
    if not n_bytes or waiting.n_bytes + n_bytes <= quota.queued_mib << 20:
        return ""
    return (
        f"requests since the last checkpoint of your models would be longer than the quota of {quota.queued_mib} MiB"
        " (fix: use optim_step, or fewer data for a step)"
    )


def ready(next_seq: int, held: Collection[int]) -> list[int]:
    """The seqs that are to be carried out now, in their order."""
    return list(takewhile(held.__contains__, count(next_seq)))


def sealed(next_seq: int, held: Mapping[int, float], now_s: float) -> int | None:
    """The seq with which to continue although those before it are missing; ``held`` is when each one came."""
    if not held or next_seq in held or now_s - min(held.values()) < GAP_S:
        return None
    return min(held)


def spoiled(ops: Sequence[Op], number: int) -> bool:
    """Whether pass ``number`` of ``ops`` is to be sent as a `Poison`: what its client heard stays true after a restart.

    A pass that was answered as failed fails again. So does a step, as all passes of its window are spoiled.
    """
    later = [op for op in ops if op.number >= number]
    if later[0].kind is not OpKind.PASS:
        return False
    close = next((op for op in later if op.kind is OpKind.CLOSE), None)
    return bool(later[0].failed or (close and close.failed))

"""What the loop waits for: batches, publishes, checkpoints, evaluations. All calls are collective over the ranks.

Rank 0 asks the controller, the others wait for rank 0 in the control exchange, whose patience is the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from areal_lora.data.collate import assert_staleness, collate
from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import AlignmentError
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.tenant import Tenant
from areal_lora.types import TrainBatch, TrajectoryGroup

if TYPE_CHECKING:
    from areal_lora.trainer.loop import Trainer

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrajectoryGroup] | None).decode


def catch_up(trainer: Trainer) -> None:
    """While the controller is waited for, a server that comes (back) gets the newest versions at once, and
    one that falls silent is given up: without either there might never be a batch, or an evaluation.
    """
    for tenant in trainer.tenants:
        join_publish(trainer, tenant)
        trainer.publishing.catch_up(tenant)


def evaluated(trainer: Trainer, tenant: Tenant) -> bool:
    """Wait until every evaluation of the tenant has an answer; False if there are servers to see to first."""
    done = trainer.recorder.wait_evals(tenant, trainer.publishing.changed) if trainer.recorder else True
    return bool(trainer.control.broadcast_bytes(bytes([done]) if trainer.control.rank == 0 else None)[0])


def join_checkpoint(trainer: Trainer, tenant: Tenant) -> None:
    saved = trainer.checkpointing.join(tenant)
    if trainer.recorder and saved is not None:
        trainer.recorder.checkpointed(saved)
    wait_for_rank_0(trainer)


def join_publish(trainer: Trainer, tenant: Tenant) -> None:
    trainer.publishing.join(tenant)
    wait_for_rank_0(trainer)


def wait_for_rank_0(trainer: Trainer) -> None:
    """It alone may have waited for the controller, for longer than other collectives would wait for it."""
    trainer.control.broadcast_bytes(b"" if trainer.control.rank == 0 else None)


def begin_audit(trainer: Trainer, tenant: Tenant, batch: TrainBatch) -> None:
    """Rank 0 has a server confirm some of the batch; not collective."""
    if trainer.auditor:
        trainer.auditor.begin(tenant.name, batch, tenant.version, tenant.config.sampling.temperature)


def collect_audit(trainer: Trainer, *, wait: bool = False) -> Audit | None:
    """What servers have said so far about this batch and the one before, on rank 0.

    Raises:
        AlignmentError: the versions that are said to have sampled the batch contradict it; on every rank.
    """
    audit = trainer.auditor.collect(wait=wait) if trainer.auditor else None
    error = trainer.control.broadcast_bytes(
        (audit.error if audit else "").encode() if trainer.control.rank == 0 else None
    ).decode()
    if error:
        raise AlignmentError(error)
    return audit


def next_batch(trainer: Trainer, tenant: Tenant) -> tuple[TrainBatch, dict[int, int]]:
    """The groups of the next step on every rank, and their staleness histogram in tokens.

    Raises:
        StalenessError: a token is older than ``max_staleness`` (contract C7).
    """
    publishing, recorder = trainer.publishing, trainer.recorder
    while True:
        groups = share_groups(recorder.next_groups(tenant, publishing.changed) if recorder else None, trainer.control)
        if groups is not None:
            break
        catch_up(trainer)
    batch = collate(groups)
    return batch, assert_staleness(batch, tenant.version, trainer.config.rollout.max_staleness)


def share_groups(groups: list[TrajectoryGroup] | None, exchange: Exchange) -> list[TrajectoryGroup] | None:
    """What rank 0 passes, on every rank: the groups, or None if there is something else to do first."""
    return _decode(exchange.broadcast_bytes(_encode(groups) if exchange.rank == 0 else None))

"""The figures of one adapter's feed, as trainer and console show them."""

from __future__ import annotations

from typing import TypeVar

from areal_lora.rollout.channel.channel_messages import Stats
from areal_lora.rollout.controller.pacing import PacingStatus
from areal_lora.rollout.controller.pool import GroupPool
from areal_lora.rollout.controller.staleness import Freshness
from areal_lora.rollout.ledger.ledger_records import GroupState
from areal_lora.rollout.ledger.reconcile import ROLLED_BACK

K = TypeVar("K")
REISSUED = (Freshness.STALE, Freshness.FROM_THE_FUTURE, ROLLED_BACK)


def count(counts: dict[K, int], key: K) -> None:
    counts[key] = counts.get(key, 0) + 1


def stats_of(pool: GroupPool, newest_version: int, pacing: PacingStatus, faults: dict[str, str]) -> Stats:
    """Counts of the ledger and of the groups held now; see :class:`Stats`."""
    ledger = pool.ledger
    counts, dropped, counters = ledger.counts, dict(ledger.drop_reasons), ledger.head.counters
    return Stats(
        newest_version=newest_version,
        waiting=len(pool.waiting),
        ready=len(pool.ready),
        running=len(pool.running),
        leased=counts[GroupState.LEASED],
        leased_steps=len(pool.leases),
        issued=ledger.head.issued,
        consumed=counts[GroupState.CONSUMED],
        dropped=dropped,
        reissued=sum(dropped.get(reason, 0) for reason in REISSUED),
        rolled_back=dropped.get(ROLLED_BACK, 0),
        retried=dict(counters.retried),
        late=counters.late,
        staleness=dict(counters.staleness),
        tokens_generated=counters.tokens,
        idle_s=counters.idle_s + pool.idle.so_far_s,
        generation_s=counters.generation_s,
        ahead=pacing.ahead,
        margin_s=pacing.margin_s,
        spare_s=pacing.spare_s,
        faults=dict(faults),
    )

from __future__ import annotations

import time

import msgspec

from areal_lora.config.models import WeightSyncConfig
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.trainer.decisions import Attempt, Decision
from areal_lora.weight_sync.trainer.publish_job import SLACK_S, Budget, PackedShard, PublishJob
from areal_lora.weight_sync.trainer.publisher import next_step
from tests.support.weight_sync.helpers import BASE, RUN, layout_of, share, values


class Leading:
    """Takes the place of an exchange: rank 0 has shared ``decision``."""

    rank = 1

    def __init__(self, decision):
        self.decision, self.patience_s = decision, 0.0

    def broadcast_bytes(self, data, timeout_s=None):
        assert data is None
        self.patience_s = timeout_s
        return msgspec.msgpack.encode(self.decision)


def test_another_rank_takes_rank_0s_step_and_remaining_time():
    config = WeightSyncConfig()
    layout = layout_of(*share(values(0)))
    ref = AdapterRef(name="a", version=0)
    job = PublishJob(
        manifest=ShardManifest(run=RUN, ref=ref, parent=None, base_digest=BASE, layout=layout.digest),
        layout=layout,
        shard=PackedShard(layout, 1),
        probe=None,
        began_s=time.monotonic(),
        budget=Budget(config),
    )
    exchange = Leading(Decision(step=Attempt(), left_s=7.0))
    assert next_step(None, exchange, job, None, None) == Attempt()
    assert abs(exchange.patience_s - (config.publish_s + SLACK_S)) < 1.0
    assert abs(job.budget.left_s - 7.0) < 1.0
    assert abs(job.budget.deadline - (time.monotonic() + 7.0 - config.verdict_s)) < 1.0

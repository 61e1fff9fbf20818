from __future__ import annotations

import threading

import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import PublishError
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.trainer.publish_job import Budget, JobQueue, PackedShard, PublishJob
from tests.support.weight_sync.helpers import BASE, KEYS, RUN, layout_of, share, values

LAYOUT = layout_of(*share(values(0)))


def job(name: str) -> PublishJob:
    ref = AdapterRef(name=name, version=0)
    return PublishJob(
        manifest=ShardManifest(run=RUN, ref=ref, parent=None, base_digest=BASE, layout=LAYOUT.digest),
        layout=LAYOUT,
        shard=PackedShard(LAYOUT, 1, KEYS),
        probe=None,
        began_s=0.0,
        budget=Budget(WeightSyncConfig()),
    )


def test_the_oldest_goes_first_and_those_that_wait_take_turns() -> None:
    queue, jobs = JobQueue(), [job(name) for name in "abc"]
    for made in jobs:
        queue.put(made)
    a, b, c = jobs
    assert queue.oldest() is a
    assert [queue.after(j) for j in jobs] == [b.number, c.number, a.number]
    assert queue.take(c.number, 1.0) is c
    queue.end(b)
    assert queue.after(a) == c.number
    queue.end(c)
    assert queue.oldest() is a
    assert queue.after(a) is None


def test_a_rank_that_is_late_finds_the_publish_that_rank_0_chose() -> None:
    queue, a, b = JobQueue(), job("a"), job("b")
    queue.put(a)
    threading.Timer(0.1, queue.put, (b,)).start()
    assert queue.take(1, 10.0) is b
    with pytest.raises(PublishError, match="rank 0 started publish 2"):
        queue.take(2, 0.05)


def test_a_closed_queue_ends_after_its_last_job() -> None:
    queue, a = JobQueue(), job("a")
    queue.put(a)
    queue.close()
    assert queue.oldest() is a
    queue.end(a)
    assert queue.oldest() is None

from __future__ import annotations

import threading
import time
from contextlib import closing

import msgspec
import pytest
import torch

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import PublishError
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import Payload, make_layout
from areal_lora.weight_sync.link.relays import RelayGroup
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.trainer import publish_job, publisher
from areal_lora.weight_sync.trainer.decisions import Attempt, Decision, Fail, Failure
from areal_lora.weight_sync.trainer.publish_job import SLACK_S, Budget, PackedShard, PublishJob
from areal_lora.weight_sync.trainer.publisher import next_step
from tests.support.clocks import Clock
from tests.support.platforms.accelerator import Accelerator
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.helpers import BASE, KEYS, RUN, layout_of, share, spec, values
from tests.support.weight_sync.recorded_lane import RecordedLane


class Leading:
    """Takes the place of an exchange: rank 0 has shared ``decision``."""

    rank = 1

    def __init__(self, decision):
        self.decision, self.patience_s = decision, 0.0

    def broadcast_bytes(self, data, timeout_s=None):
        assert data is None
        self.patience_s = timeout_s
        return msgspec.msgpack.encode(self.decision)


def job_of(config):
    layout = layout_of(*share(values(0)))
    ref = AdapterRef(name="a", version=0)
    return PublishJob(
        manifest=ShardManifest(run=RUN, ref=ref, parent=None, base_digest=BASE, layout=layout.digest),
        layout=layout,
        shard=PackedShard(layout, 1, KEYS),
        probe=None,
        began_s=time.monotonic(),
        budget=Budget(config),
    )


def test_another_rank_takes_rank_0s_step_and_remaining_time(monkeypatch):
    monkeypatch.setattr(publish_job, "time", Clocked())
    config = WeightSyncConfig()
    job = job_of(config)
    exchange = Leading(Decision(step=Attempt(), left_s=7.0, form_left_s=3.0))
    assert next_step(None, exchange, job, None, None) == Attempt()
    assert exchange.patience_s == pytest.approx(config.timeout_s + config.verdict_s + SLACK_S)
    assert job.budget.form_left_s == 3.0
    assert job.budget.left_s == pytest.approx(7.0)
    assert job.budget.deadline == pytest.approx(7.0 - config.verdict_s)


class Clocked:
    """``time`` of the publisher."""

    def __init__(self):
        self.monotonic = self.perf_counter = Clock()


class Announced:
    """Takes the place of a leader: the deadlines that it announces."""

    def __init__(self):
        self.deadlines = []

    def announce(self, job, deadline):
        self.deadlines.append(deadline)

    def close(self):
        pass


def test_a_transfer_has_its_whole_time_however_long_its_groups_take_to_form(monkeypatch):
    clocked, leader, config = Clocked(), Announced(), WeightSyncConfig(timeout_s=30.0)
    clock, forming = clocked.monotonic, []
    monkeypatch.setattr(publisher, "time", clocked)
    monkeypatch.setattr(publish_job, "time", clocked)
    rank = publisher.Publisher(run=RUN, config=config, exchange=SoloExchange(), secret="s", leader=leader)
    job = job_of(config)
    job.packed.set()

    def form(self, job, attempt, deadline):
        forming.append((deadline - clock.now, job.budget.patience_s))
        clock.now += 25.0

    monkeypatch.setattr(publisher.Publisher, "_form", form)
    for attempt in range(3):
        before = job.budget.left_s
        rank._attempt(job, Attempt(groups=[RelayGroup(())]))
        assert leader.deadlines[-1] == clock.now + config.attempt_s
        spent = before - job.budget.left_s
        assert spent == pytest.approx(0.0 if attempt < 2 else 15.0), "the third exceeds what a publish may form"
    rank.close()
    patience = config.timeout_s + config.form_s + config.verdict_s + SLACK_S
    assert forming[:2] == [(config.form_s, patience)] * 2, "another rank waits as long as this one forms"
    assert job.budget.form_left_s == 0.0


class Attempting(Announced):
    """A leader of one attempt, after which it ends the publish."""

    def decide(self, job, results, next_turn):
        return Attempt() if results is None else Fail(failure=Failure(kind="failed", message="seen"), intact=True)


class Merging:
    """A `Pack` of one tensor of merged weights, which takes ``seconds``. ``threads`` start it, then fill the shard."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.threads = clock, seconds, []

    def __call__(self, flat):
        self.threads.append(threading.current_thread())
        return self.fill(flat)

    def fill(self, flat):
        self.threads.append(threading.current_thread())
        flat.fill_(1)
        yield 1
        self.clock.now += self.seconds


def test_weights_are_merged_beside_training_and_no_time_of_a_transfer_counts_it(monkeypatch):
    """The main thread only copies the adapter; a version that is sent again is not merged again."""
    clocked, leader, config = Clocked(), Attempting(), WeightSyncConfig(timeout_s=30.0)
    for module in (publisher, publish_job):
        monkeypatch.setattr(module, "time", clocked)
    began, pack, queued = clocked.monotonic.now, Merging(clocked.monotonic, 500.0), []
    monkeypatch.setattr(publisher, "lane_of", lambda device: RecordedLane(queued, device))
    rank = publisher.Publisher(run=RUN, config=config, exchange=SoloExchange(), secret="ab" * 32, leader=leader)
    layout = make_layout(spec(), "float32", {0: [("x.weight", (4, 6))]}, {}, Payload.MERGED)
    ref = AdapterRef(name="a", version=0)
    job = rank.publish(ref, None, layout, pack, BASE, None)
    with pytest.raises(PublishError, match="seen"):
        job.wait()
    again = rank.again("a")
    with pytest.raises(PublishError, match="seen"):
        again.wait()
    rank.close()
    assert [thread is threading.current_thread() for thread in pack.threads] == [True, False]
    assert pack.threads[1] is rank._thread
    assert queued == ["queue"], "a device does it on its own stream, not between the kernels of the model"
    assert job.pack_ms == pytest.approx(500e3)
    assert leader.deadlines == [began + 500.0 + config.attempt_s] * 2


@pytest.mark.parametrize("error", [MemoryError("no room"), PublishError("no room")])
def test_a_rank_that_fails_to_merge_tells_the_others(error):
    """They wait for it without a time limit, because merging may take long."""

    class Told(Attempting):
        def decide(self, job, results, next_turn):
            told.extend(sent.own.message for sent in results or ())
            return super().decide(job, results, next_turn)

    def pack(flat):
        yield from ()
        raise error

    told, config = [], WeightSyncConfig(timeout_s=30.0)
    rank = publisher.Publisher(run=RUN, config=config, exchange=SoloExchange(), secret="ab" * 32, leader=Told())
    layout = make_layout(spec(), "float32", {0: [("x.weight", (4, 6))]}, {}, Payload.MERGED)
    job = rank.publish(AdapterRef(name="a", version=0), None, layout, pack, BASE, None)
    with pytest.raises(PublishError, match="seen"):
        job.wait()
    rank.close()
    assert len(told) == 1
    assert "no room" in told[0]


def test_the_publishers_thread_works_on_the_ranks_device(monkeypatch):
    accelerator, devices, config = Accelerator(monkeypatch), [], WeightSyncConfig()

    def run(self, job):
        devices.append(accelerator.current)
        return PublishError("no server is needed here")

    monkeypatch.setattr(publisher.Publisher, "_run", run)
    rank = publisher.Publisher(
        run=RUN, config=config, exchange=SoloExchange(), secret="s", device=torch.device("cuda", 3)
    )
    job = job_of(config)
    rank._jobs.put(job)
    with pytest.raises(PublishError, match="no server"):
        job.wait()
    rank.close()
    assert devices == [3]
    assert accelerator.contexts == {3}


@pytest.mark.parametrize(
    ("mib", "sources", "shared", "bucket"),
    [(256, 1, True, 256), (256, 8, True, 32), (256, 64, True, 8), (256, 8, False, 8), (4, 8, True, 4)],
)
def test_sources_divide_the_bytes_of_a_bucket(mib, sources, shared, bucket):
    """A receiver has buffers for the buckets of each; small ones would wait for the latency of a broadcast."""
    config, server = (
        WeightSyncConfig(bucket_mib=mib),
        ServerEndpoint(name="server-0", host="h", admin_port=1, data_port=2, workers=1),
    )
    publishing = publisher.Publisher(run=RUN, config=config, exchange=SoloExchange(), secret="s" * 32)
    attempt = Attempt(groups=[RelayGroup((server,))], sources=list(range(sources)), shared=shared)
    try:
        with closing(publishing._listener(attempt.groups[0], attempt, time.monotonic() + 60)) as listener:
            assert listener.endpoint.bucket_bytes == bucket << 20
    finally:
        publishing.close()

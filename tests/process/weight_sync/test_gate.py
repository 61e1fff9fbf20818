"""A publish that has to wait for something else, a checkpoint, before any server may hear of the version."""

from __future__ import annotations

import threading
import time

import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, layout_of, ref, shapes_of, share, values
from tests.support.weight_sync.memory_server import MemoryServer

pytestmark = pytest.mark.slow
WAIT_S = 1.5


def test_no_server_hears_of_a_version_before_its_gate_has_opened() -> None:
    """Longer than the publish may take: its deadline begins at the gate. Sent again, it does not wait again."""
    config = WeightSyncConfig(timeout_s=1.0, bucket_mib=0.001)
    owned, aliases = share(values(0))
    layout = layout_of(owned, aliases)
    opened, asked = threading.Event(), list[float]()

    def gate() -> None:
        asked.append(time.monotonic())
        assert opened.wait(10.0)

    with MemoryServer(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of) as server:
        leader = Leader(run=RUN, secret=SECRET, servers=[server.endpoint], config=config)
        publisher = Publisher(run=RUN, config=config, exchange=SoloExchange(), leader=leader, secret=SECRET)
        handle = publisher.publish(ref(0), None, layout, pack_of(layout, 0, dict(owned)), BASE, None, gate)
        time.sleep(WAIT_S)
        assert not handle.outcome.done()
        assert sorted(server.held.active) == []
        opened.set()
        report = handle.wait()
        assert sorted(server.held.active) == [ref(0)]
        assert report.phases["gate"] > 1e3 * (WAIT_S - 0.1)
        assert report.phases["ack"] < 1e3
        publisher.again(ref(0).name).wait()
        assert len(asked) == 1
        publisher.close()

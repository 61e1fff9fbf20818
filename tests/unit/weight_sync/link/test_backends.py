"""What a device's backend is given, and when its work must be over. The groups are recorders: no device is here."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist

from areal_lora.errors import PublishError
from areal_lora.weight_sync.link import backends, broadcast_groups
from areal_lora.weight_sync.link.backends import Backend, GroupSeat
from areal_lora.weight_sync.link.broadcast_groups import CPU, BroadcastGroup, join_group
from areal_lora.weight_sync.messages import SourceEndpoint
from tests.support.clocks import Clock
from tests.support.weight_sync.recorded_lane import RecordedLane

ENDPOINT = SourceEndpoint(source=0, host="127.0.0.1", port=1, world=2, token="t", bucket_bytes=64, backend="recorder")


class Recorder:
    """A process group that remembers sizes and time-outs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.issued: list[timedelta] = []
        self.waited: list[timedelta] = []
        self.abort = lambda: None

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> SimpleNamespace:
        self.sizes.append(tensors[0].numel())
        self.issued.append(options.timeout)
        return SimpleNamespace(wait=self.waited.append, is_completed=lambda: True)


@pytest.mark.parametrize("from_issue", [False, True])
def test_a_late_wait_gets_the_time_until_the_deadline_as_its_backend_counts_it(
    from_issue: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, clock = Recorder(), Clock()
    for module in (broadcast_groups, backends):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    group = BroadcastGroup(ENDPOINT, 1, Backend(recorder, None, timed_from_issue=from_issue), CPU, leave=lambda: None)
    transfer = group.start(torch.zeros(4, dtype=torch.uint8), 5.0)
    clock.now = 0.5
    transfer.wait()
    [waited] = recorder.waited
    assert waited.total_seconds() == pytest.approx(5.0 if from_issue else 4.5)
    assert recorder.issued[0].total_seconds() == pytest.approx(5.0)


def test_a_group_through_a_device_connects_while_it_is_joined() -> None:
    recorder = Recorder()
    group = BroadcastGroup(ENDPOINT, 1, Backend(recorder, RecordedLane([], CPU)), CPU, leave=lambda: None)
    group.agree(True, time.monotonic() + 120.0)
    assert recorder.sizes == [1]
    assert len(recorder.waited) == 1
    assert not group.same_host
    group.close()


def test_nccl_waits_on_the_host_and_takes_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {}

    class Nccl:
        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace(min_ctas=None, max_ctas=None)

        def __init__(self, store: object, rank: int, world: int, options: Options) -> None:
            made.update(options=options, blocking=os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    monkeypatch.setattr(backends.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(backends, "Lane", partial(RecordedLane, []))
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    seat = GroupSeat(
        store=dist.HashStore(), rank=0, world=2, bind="127.0.0.1", timeout_s=4.0, device=torch.device("meta")
    )
    backend = backends.backend_of("nccl")(seat)
    assert backend.through is not None
    assert (backend.through.device, backend.timed_from_issue, backend.same_host) == (seat.device, True, False)
    assert made["blocking"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    options = made["options"]
    assert options._timeout == timedelta(seconds=4)
    assert options.config.min_ctas == 1
    assert options.config.max_ctas <= 2


def test_a_member_with_another_version_of_the_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "library_of", lambda name: "NCCL 2.28.3")
    endpoint = msgspec.structs.replace(ENDPOINT, backend="gloo", library="NCCL 2.27.5")
    with pytest.raises(PublishError, match=r"rank 0 has NCCL 2\.27\.5, member 1 has NCCL 2\.28\.3"):
        join_group(endpoint, 1, "127.0.0.1", 1.0, "secret")


def test_the_versions_of_gloo_do_not_matter() -> None:
    assert backends.library_of("gloo") == ""

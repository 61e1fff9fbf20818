"""What a device's backend is given, and when its work must be over. The groups are recorders: no device is here."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist

from areal_lora.errors import PublishError
from areal_lora.platforms.device import Lane, lane_of
from areal_lora.weight_sync.link import backends, broadcast_groups
from areal_lora.weight_sync.link.backends import BLOCKING_WAIT, Backend, DeviceSide, GroupSeat
from areal_lora.weight_sync.link.broadcast_groups import CPU, BroadcastGroup, join_group
from areal_lora.weight_sync.messages import SourceEndpoint
from tests.support.clocks import Clock
from tests.support.platforms.accelerator import HIGHEST, LOWEST, Accelerator
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
        return SimpleNamespace(wait=self.waited.append, is_completed=lambda: True, exception=lambda: None)


def test_a_late_wait_gets_the_time_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, clock = Recorder(), Clock()
    monkeypatch.setattr(broadcast_groups, "time", SimpleNamespace(monotonic=clock))
    group = BroadcastGroup(ENDPOINT, 1, Backend(recorder, None), CPU, leave=lambda: None)
    transfer = group.start(torch.zeros(4, dtype=torch.uint8), 5.0)
    clock.now = 0.5
    transfer.wait()
    [waited] = recorder.waited
    assert waited.total_seconds() == pytest.approx(4.5)
    assert recorder.issued[0].total_seconds() == pytest.approx(5.0)


def test_a_group_through_a_device_connects_while_it_is_joined() -> None:
    recorder = Recorder()
    group = BroadcastGroup(ENDPOINT, 1, Backend(recorder, RecordedLane([], CPU)), CPU, leave=lambda: None)
    group.agree(True, time.monotonic() + 120.0)
    assert recorder.sizes == [1]
    assert not group.same_host
    group.close()


class Nccl:
    """A ``ProcessGroupNCCL``: it takes its stream when it connects, and reads the environment when it is made."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.config = SimpleNamespace(min_ctas=None, max_ctas=None)
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout: timedelta | None = None

    def __init__(self, store: object, rank: int, world: int, options: Options) -> None:
        self.options, self.blocking = options, os.environ.get(BLOCKING_WAIT)
        self.priority = HIGHEST if options.is_high_priority_stream else LOWEST

    def abort(self) -> None:
        pass


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    monkeypatch.setattr(backends.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv(BLOCKING_WAIT, "0")  # as found by this process, and restored afterwards
    lane_of.cache_clear()
    yield Accelerator(monkeypatch)
    lane_of.cache_clear()


def seat_on(device: torch.device) -> GroupSeat:
    return GroupSeat(store=dist.HashStore(), rank=0, world=2, bind="127.0.0.1", timeout_s=4.0, device=device)


def test_nccl_waits_on_the_host_and_takes_few_blocks(accelerator: Accelerator) -> None:
    seat = seat_on(torch.device("cuda", 3))
    backend = backends.backend_of("nccl")(seat)
    assert backend.through is lane_of(seat.device)
    assert not backend.same_host
    assert isinstance(backend.group, Nccl)
    assert backend.group.blocking == "1"
    options = backend.group.options
    assert options._timeout == timedelta(seconds=4)
    assert options.config.min_ctas == 1
    assert options.config.max_ctas <= 2


def test_no_formation_takes_a_stream_of_the_models_pool(accelerator: Accelerator) -> None:
    """The model's stream is the first of its pool. Eleven formations of three streams would come to it again."""
    device, model = torch.device("cuda", 3), accelerator.take(LOWEST)
    streams = set[int]()
    for _ in range(40):
        backend = backends.backend_of("nccl")(seat_on(device))
        assert isinstance(backend.group, Nccl)
        with closing(BroadcastGroup(ENDPOINT, 1, backend, device, leave=lambda: None)):
            streams.add(accelerator.take(backend.group.priority))
    assert model not in streams
    assert accelerator.taken[LOWEST] == 1
    assert accelerator.taken.total() == 1 + 40 + 1, "one lane for all groups"


def test_the_environment_is_set_once_and_never_changed_back(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL reads it in other threads: C's ``getenv`` is no reader that a writer may meet."""
    changes: list[str] = []
    before = os.environ

    class Watched(dict[str, str]):
        def __setitem__(self, key: str, value: str) -> None:
            changes.append(value)
            super().__setitem__(key, value)

        def __delitem__(self, key: str) -> None:
            changes.append("deleted")
            super().__delitem__(key)

    monkeypatch.setattr(backends.os, "environ", Watched(before))
    threads = [
        threading.Thread(target=backends.backend_of("nccl"), args=(seat_on(torch.device("cuda", 3)),)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert changes == ["1"]


def test_broadcasts_make_no_context_on_another_device(accelerator: Accelerator) -> None:
    lane = Lane(torch.device("cuda", 3))
    side = DeviceSide(lane)

    def broadcast() -> dist.Work:
        with lane.queue():
            return dist.Work()

    side.issue(broadcast).result(120)
    side.close()
    assert accelerator.contexts == {3}


def test_a_member_with_another_version_of_the_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "library_of", lambda name: "NCCL 2.28.3")
    endpoint = msgspec.structs.replace(ENDPOINT, backend="gloo", library="NCCL 2.27.5")
    with pytest.raises(PublishError, match=r"rank 0 has NCCL 2\.27\.5, member 1 has NCCL 2\.28\.3"):
        join_group(endpoint, 1, "127.0.0.1", 1.0, "secret")


def test_nccl_variables_that_a_communicator_shares_are_part_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")  # each host has its own
    monkeypatch.setenv("NCCL_PROTO", "")
    assert backends.library_of("nccl") == "NCCL 2.30.7"
    vllm = Path(find_spec("vllm").origin).parent  # not imported: it is slow
    text = (vllm / "model_executor" / "determinism" / "batch_invariant.py").read_text(encoding="utf-8")
    pins = re.findall(r'"(NCCL_\w+)": "', text)
    pins.remove("NCCL_COLLNET_ENABLE")
    assert len(pins) > 5
    for name in pins:
        with monkeypatch.context() as scope:
            scope.setenv(name, "1")
            assert backends.library_of("nccl") == f"NCCL 2.30.7 {name}=1"


def test_the_versions_of_gloo_do_not_matter() -> None:
    assert backends.library_of("gloo") == ""

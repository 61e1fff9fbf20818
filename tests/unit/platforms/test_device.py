from __future__ import annotations

import contextlib
import threading
import types

import numpy as np
import pytest
import torch

from areal_lora.errors import ConfigError
from areal_lora.platforms.device import (
    finish_stream,
    held_bytes,
    host_buffer,
    lane_of,
    own_device,
    peak_bytes,
    peak_flops,
    profiler_range,
)
from tests.support.platforms.accelerator import LOWEST, Accelerator


def test_a_rank_takes_the_device_of_its_place_on_the_node(monkeypatch):
    chosen = []
    module = types.SimpleNamespace(set_device=chosen.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert own_device("cuda", 3) == torch.device("cuda", 3)
    assert own_device("cpu", 3) == torch.device("cpu")
    assert chosen == [torch.device("cuda", 3)]


def test_the_end_of_a_pass_waits_for_its_own_stream_and_not_for_a_publish(monkeypatch):
    waits, device = [], torch.device("cuda", 3)
    stream = types.SimpleNamespace(synchronize=lambda: waits.append("stream"))
    module = types.SimpleNamespace(current_stream=lambda of: stream if of == device else None)  # no `synchronize`
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    finish_stream(device)
    finish_stream(torch.device("cpu"))
    assert waits == ["stream"]


def test_a_device_has_one_lane_which_is_never_a_stream_of_the_models_pool(monkeypatch):
    accelerator, device = Accelerator(monkeypatch), torch.device("cuda", 3)
    lane_of.cache_clear()
    lanes = {id(lane_of(device)) for _ in range(40)}
    assert len(lanes) == 1
    assert accelerator.taken.total() == 1
    assert LOWEST not in accelerator.taken
    assert lane_of(torch.device("cpu")) is None
    lane_of.cache_clear()


def test_threads_enter_a_lane_at_once(monkeypatch):
    """An object of torch 2.11 refuses the second; a later one would restore what the other thread had."""
    accelerator = Accelerator(monkeypatch)
    lane_of.cache_clear()
    lane, both, entered = lane_of(torch.device("cuda", 3)), threading.Barrier(2), []

    def enter(own):
        accelerator.select(own)
        with lane.queue():
            entered.append(accelerator.current)
            both.wait(120)
        entered.append((own, accelerator.current))

    threads = [threading.Thread(target=enter, args=(own,)) for own in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entered[:2] == [3, 3]
    assert sorted(entered[2:]) == [(3, 3), (5, 5)]
    lane_of.cache_clear()


def test_memory_of_a_lane_is_allocated_on_its_stream(monkeypatch):
    """torch's allocator orders the work of one stream only: another's memory may still be read."""
    accelerator, at = Accelerator(monkeypatch), []
    lane_of.cache_clear()
    lane = lane_of(torch.device("cuda", 3))
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: at.append(accelerator.current))
    lane.twin(torch.zeros(4))
    lane.empty([5], torch.uint8)
    assert (at, accelerator.current) == ([3, 3], 0)
    lane_of.cache_clear()


def test_an_unknown_kind_of_device_is_a_configuration_error():
    with pytest.raises(ConfigError) as e:
        own_device("meta", 0)
    assert e.value.path == "cluster.device"


def test_a_host_buffer_has_its_length_and_can_be_written():
    for nbytes in (0, 1, 5000):
        buffer = host_buffer(nbytes, torch.device("cpu"))
        assert (buffer.dtype, buffer.shape) == (np.uint8, (nbytes,))
        buffer[:] = 7


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_peak_is_known_by_the_devices_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace(get_device_name=lambda: name))
    assert peak_flops("cuda") == (None if tflops is None else tflops * 1e12)
    assert peak_flops("cpu") is None


def test_each_peak_of_memory_is_that_since_the_last_call(monkeypatch):
    peaks, device = [30, 20], torch.device("cuda", 1)
    module = types.SimpleNamespace(
        memory_allocated=lambda _: 10,
        max_memory_allocated=lambda _: peaks[0],
        reset_peak_memory_stats=lambda _: peaks.pop(0),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert (held_bytes(device), peak_bytes(device), peak_bytes(device)) == (10, 30, 20)
    assert (held_bytes(torch.device("cpu")), peak_bytes(torch.device("cpu"))) == (0, None)


def test_a_range_is_in_a_trace_and_with_cuda_one_of_nvtx(monkeypatch):
    pushed = []
    nvtx = types.SimpleNamespace(range=lambda name: pushed.append(name) or contextlib.nullcontext())
    with torch.profiler.profile() as recorded:
        with profiler_range("forward"):
            torch.ones(1)
        assert pushed == []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
        with profiler_range("backward"):
            torch.ones(1)
    assert pushed == ["backward"]
    assert {"forward", "backward"} <= {event.name for event in recorded.events()}

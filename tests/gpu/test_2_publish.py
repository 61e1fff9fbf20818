"""Packing from device memory, and transfers between processes on one device."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from areal_lora.errors import PublishError
from areal_lora.families.registry import known_config
from areal_lora.weight_sync.link.backends import GroupSeat, backend_of
from areal_lora.weight_sync.link.broadcast_groups import BroadcastGroup
from areal_lora.weight_sync.messages import SourceEndpoint
from tests.support.gpu.cases import Pair, pack

MB = 2**20
TIMEOUT_S = 60.0


def test_pack_from_device_memory(device: torch.device, record: Any) -> None:
    hf = {**(known_config("Qwen/Qwen3-30B-A3B") or {}), "num_hidden_layers": 4}
    figures = pack(device, hf, rank=32)
    record("0 differing bytes", figures)
    assert figures["differing_bytes"] == 0


def test_two_processes_on_one_device_over_gloo(device: torch.device, record: Any) -> None:
    figures: dict[str, float | str | bool] = {}
    for how in ("whole", "killed", "stopped"):
        pair = Pair(device, "gloo", 256 * MB, 16 * MB, TIMEOUT_S)
        try:
            pair.meet()
            began = time.monotonic()
            sent = pair.send(seed=3)
            assert pair.pipe.poll(TIMEOUT_S)
            figures["equal_digest"] = pair.pipe.recv() == sent
            figures["seconds"] = time.monotonic() - began
            if how != "whole":
                assert pair.receiver.pid is not None
                os.kill(pair.receiver.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                figures[f"seconds_until_error_{how}"] = pair.fail(3.0)
        finally:
            pair.close()
    record("equal digests; an error at most 1 s after the deadline of 3 s", figures)
    assert figures["equal_digest"]
    assert max(float(figures["seconds_until_error_killed"]), float(figures["seconds_until_error_stopped"])) <= 4.0


def test_nccl_refuses_two_members_on_one_device(device: torch.device, record: Any) -> None:
    pair = Pair(device, "nccl", 16 * MB, 16 * MB, TIMEOUT_S)
    began = time.monotonic()
    try:
        with pytest.raises(PublishError) as caught:
            pair.meet()
    finally:
        pair.close()
    took = time.monotonic() - began
    record(f"a clear error, no hang: at most {TIMEOUT_S + 1:.0f} s", {"error": str(caught.value), "seconds": took})
    assert took <= TIMEOUT_S + 1.0


def test_a_group_of_one_over_nccl(device: torch.device, record: Any) -> None:
    """What a communicator costs, and when a wait for a broadcast that does not end fails."""
    endpoint = SourceEndpoint(source=0, host="127.0.0.1", port=1, world=1, token="t", bucket_bytes=MB, backend="nccl")
    free, _ = torch.cuda.mem_get_info(device)
    began = time.monotonic()
    seat = GroupSeat(store=dist.HashStore(), rank=0, world=1, bind="127.0.0.1", timeout_s=TIMEOUT_S, device=device)
    group = BroadcastGroup(endpoint, 0, backend_of("nccl")(seat), device, leave=lambda: None)
    group.agree(False, time.monotonic() + TIMEOUT_S)
    initialised = time.monotonic() - began
    taken = free - torch.cuda.mem_get_info(device)[0]
    data = torch.arange(4 * MB, dtype=torch.uint8).pin_memory()
    before = data.clone()
    group.start(data, time.monotonic() + TIMEOUT_S).wait()
    same = torch.equal(data, before)
    assert group._device is not None
    clock_hz = 1e3 * torch.cuda.get_device_properties(device).clock_rate
    with group._device.lane.queue():
        torch.cuda._sleep(int(4 * clock_hz))  # the next broadcast cannot begin for about 4 s
    issued = time.monotonic()
    late = group.start(data, issued + 1.5)
    time.sleep(1.0)
    with pytest.raises(PublishError) as caught:
        late.wait()
    failed_after = time.monotonic() - issued
    group.close()
    figures = {
        "bytes_equal": same,
        "initialisation_s": initialised,
        "device_mib": taken / MB,
        "wait_failed_s_after_issue": failed_after,
        "left_s": time.monotonic() - issued - failed_after,
        "error": str(caught.value),
    }
    record("bytes equal; a broadcast with 1.5 s fails 1.5 s after its issue, and its group is left", figures)
    assert same
    assert failed_after == pytest.approx(1.5, abs=0.3)

"""What a real GPU tells of itself: NVML beside nvidia-smi, the seconds of a span beside CUDA's events."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest
import torch

from areal_lora.obs.machine import GPU_READINGS, gpu_figures, load_nvml
from areal_lora.obs.trace import Spans
from areal_lora.platforms.device import Lane, finish_stream

QUERY = "--query-gpu=index,utilization.gpu,memory.used,power.draw,temperature.gpu"
LOAD_S = 3.0
CYCLES = 100_000_000  # of a kernel that waits: 50 ms at 2 GHz


def test_nvml_reads_the_card(device: torch.device, record: Any) -> None:
    """The card multiplies matrices meanwhile: an idle one uses neither time nor much power."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    nvml, visible = load_nvml(), os.environ.get("CUDA_VISIBLE_DEVICES")
    assert nvml is not None
    a = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    until = time.monotonic() + LOAD_S
    while time.monotonic() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    (number, ours), *_ = gpu_figures(nvml, visible).items()
    printed = subprocess.check_output(
        ["nvidia-smi", QUERY, "--format=csv,noheader,nounits", "-i", number], text=True, timeout=60
    )
    began = time.perf_counter()
    gpu_figures(nvml, visible)
    index, share, used_mib, watts, celsius = map(float, printed.split(","))
    smi = {"gpu_share": share / 100, "gpu_gib": used_mib / 1024, "gpu_watts": watts, "gpu_celsius": celsius}
    apart = {f"{name}_apart": abs(ours[name] - smi[name]) for name in smi}
    figures = {**ours, **apart, "reading_ms": 1e3 * (time.perf_counter() - began)}
    record("nvidia-smi's figures: memory within 0.5 GiB, 15 degrees; utilisation above 0; a reading below 1 s", figures)
    assert ours.keys() == GPU_READINGS.keys()
    assert index == float(number)
    assert ours["gpu_share"] > 0
    assert ours["gpu_watts"] > 0
    assert apart["gpu_gib_apart"] <= 0.5
    assert apart["gpu_celsius_apart"] <= 15
    assert figures["reading_ms"] < 1000


def test_a_span_lasts_as_long_as_its_kernels_and_not_as_those_of_a_lane(device: torch.device, record: Any) -> None:
    lane, spans, ends = Lane(device), Spans(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    with lane.queue():
        torch.cuda._sleep(20 * CYCLES)
    with spans.span("passes"):
        ends[0].record()
        torch.cuda._sleep(CYCLES)
        ends[1].record()
        finish_stream(device)
    beside = time.perf_counter()
    lane.synchronize()
    figures = {
        "span_ms": 1e3 * spans.seconds["passes"],
        "kernels_ms": ends[0].elapsed_time(ends[1]),
        "lane_ms_after": 1e3 * (time.perf_counter() - beside),
    }
    record("the span lasts at least as long as its kernels, and the lane at least five times longer", figures)
    assert figures["kernels_ms"] > 20
    assert figures["span_ms"] >= 0.99 * figures["kernels_ms"]
    assert figures["lane_ms_after"] > 5 * figures["kernels_ms"]

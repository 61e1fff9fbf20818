"""Slots in device memory: bytes, speed, and a flush beside a graph that is replayed."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from areal_lora.types import AdapterSpec
from tests.support.engine.vllm_ext.slots import install, layout_of
from tests.support.gpu.cases import Experts, modules_with_stacks, write_slot
from tests.support.lazy import Lazy

lora_install = Lazy("areal_lora.engine.vllm_ext.worker.lora_install")

LAYERS, WIDTH, RANK, TOKENS, REPLAYS = 48, 4096, 32, 64, 10_000


def test_slot_writer_equals_the_cpu_writer(device: torch.device, record: Any) -> None:
    figures = write_slot(device, Experts())
    record("0 differing bytes and fingerprints, at least 20 GB/s", figures)
    assert figures["differing_bytes"] == 0
    assert figures["differing_fingerprints"] == 0
    assert figures["gb_per_s"] >= 20


def test_flush_of_an_inactive_slot_beside_a_graph(device: torch.device, record: Any) -> None:
    matrices, stacks = zip(*modules_with_stacks(LAYERS, WIDTH, RANK, device), strict=True)
    writer = lora_install.StackedSlotWriter(matrices, RANK)
    spec = AdapterSpec(name="a", base_model="m", rank=RANK, alpha=RANK, target_modules=("linear_proj",))
    versions = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        full = {n: 0.02 * rng.standard_normal(s, dtype=np.float32) for n, s in writer.expected(spec).items()}
        versions.append((layout_of(full, spec, "bfloat16"), full))
    install(writer, 0, *versions[0])
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.empty_like(x)

    def step() -> None:
        total = x
        for a, b in zip(stacks[::2], stacks[1::2], strict=True):
            hidden = total @ a.index_select(0, slot)[0, 0].t()
            total = total + hidden @ b.index_select(0, slot)[0, 0].t()
        out.copy_(total)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    old = out.clone()

    def replay(n: int) -> tuple[int, float]:
        """Replays whose output changed, and the 99th percentile of their time in ms."""
        changed = torch.zeros(1, dtype=torch.int64, device=device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            changed += (out != old).any()
            mark.record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) for a, b in pairwise(marks))
        return int(changed), times[int(0.99 * n)]

    _, alone = replay(REPLAYS)
    stop = threading.Event()

    def write() -> None:
        torch.cuda.set_device(device)
        while not stop.is_set():
            install(writer, 1, *versions[1])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        changed, beside = replay(REPLAYS)
    finally:
        stop.set()
        thread.join()
    slot.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    first = out.clone()
    step()
    torch.cuda.synchronize()
    figures = {
        "changed_outputs": changed,
        "first_replay_is_new": bool(torch.equal(first, out)) and not torch.equal(first, old),
        "replay_p99_ms_alone": alone,
        "replay_p99_ms_beside": beside,
    }
    record("0 changed outputs; the first replay after the switch is exact; p99 at most 1.1 of that alone", figures)
    assert changed == 0
    assert figures["first_replay_is_new"]
    assert beside <= 1.1 * alone

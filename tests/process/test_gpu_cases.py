"""The cases of the GPU suite run on CPUs at small sizes: what fails on a GPU is then the GPU's path."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from areal_lora.families.registry import known_config
from tests.support.distributed.spawn import forking
from tests.support.forks.starter import starter_of
from tests.support.gpu.cases import Experts, Pair, pack, write_slot
from tests.support.gpu.engines import alone, differences, judge
from tests.support.launcher.command import ROLES
from tests.support.sizes import sample
from tests.support.weight_sync import SOCKETS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CPU = torch.device("cpu")
TIMEOUT_S = 150.0


def test_slots_and_packing() -> None:
    found = [
        write_slot(CPU, Experts(layers=layers, experts=experts, hidden=64, ffn=32, rank=4), repeats=1)
        for layers, experts in ((1, 4), (1, 32), (3, 4))
    ]
    assert all(figures["differing_bytes"] == figures["differing_fingerprints"] == 0 for figures in found)
    few, many, deep = (figures["launches"] for figures in found)
    assert few == many, "launches do not grow with experts"
    assert deep < 3 * few
    hf = {**(known_config("Qwen/Qwen3-30B-A3B") or {}), "num_hidden_layers": 1, "num_experts": 4, "hidden_size": 256}
    assert pack(CPU, hf, rank=4)["differing_bytes"] == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_two_processes(how: signal.Signals) -> None:
    pair = Pair(CPU, SOCKETS, 2**22, 2**19, TIMEOUT_S, forking())
    try:
        pair.meet()
        sent = pair.send(seed=3)
        assert pair.pipe.poll(TIMEOUT_S)
        assert pair.pipe.recv() == sent
        assert pair.receiver.pid is not None
        os.kill(pair.receiver.pid, how)
        assert pair.fail(1.0) < TIMEOUT_S / 2, "a second, and not the time that the group has"
    finally:
        pair.close()


@pytest.mark.parametrize("engine", sample(["megatron", "fsdp"], 1))
def test_limits_of_bfloat16_hold_and_find_faults(tmp_path: Path, engine: str) -> None:
    python = starter_of(ROLES["trainer.python"]).interpreter(tmp_path / "python")
    found, exact = (alone(tmp_path, engine, dtype, "none", "cpu", python) for dtype in ("bfloat16", "float32"))
    print(differences(found, exact))
    judge(differences(found, exact))

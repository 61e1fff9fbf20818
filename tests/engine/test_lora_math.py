"""The learning rate and the initial adapter: pure parts of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.megatron_engine import initial_tensor
from areal_lora.platforms.megatron_cpu import install_cpu_patches
from areal_lora.weight_sync.layout import WireTensor

from ..distributed.spawn import run_ranks


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first = WireTensor("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64), 0)
    second = WireTensor("model.layers.1.self_attn.q_proj.lora_A.weight", (4, 64), 1024)
    moved = WireTensor(first.name, first.shape, 4096)
    assert torch.equal(initial_tensor(first, 1), initial_tensor(moved, 1))
    assert not torch.equal(initial_tensor(first, 1), initial_tensor(second, 1))
    assert not torch.equal(initial_tensor(first, 1), initial_tensor(first, 2))
    assert not initial_tensor(WireTensor("model.layers.0.self_attn.q_proj.lora_B.weight", (64, 4), 0), 1).any()


def rates(schedules: list[str]) -> dict[str, list[float]]:
    install_cpu_patches()
    from areal_lora.engine.megatron_utils.optimizer import lr_at

    configs = {s: OptimizerConfig(lr=2.0, warmup_steps=4, schedule=s, min_lr_ratio=0.25) for s in schedules}
    return {s: [lr_at(config, step, 24) for step in (*range(25), 1000)] for s, config in configs.items()}


@pytest.mark.slow
def test_learning_rate(tmp_path: Path) -> None:
    # In a process of its own: Megatron's patches replace parts of torch.cuda.
    half = {"constant": 2.0, "linear": 2.0 * (0.25 + 0.75 * 0.5), "cosine": 2.0 * (0.25 + 0.75 * 0.5)}
    quarter = {
        "constant": 2.0,
        "linear": 2.0 * (0.25 + 0.75 * 0.75),
        "cosine": 2.0 * (0.25 + 0.75 * (1 + 0.5**0.5) / 2),
    }
    found = run_ranks(rates, 1, tmp_path, (list(half),), timeout_s=60.0)[0]
    for schedule, values in found.items():
        assert values[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
        assert values[9] == pytest.approx(quarter[schedule])
        assert values[14] == pytest.approx(half[schedule])
        assert values[24] == pytest.approx(2.0 if schedule == "constant" else 0.5)
        assert values[25] == values[24]

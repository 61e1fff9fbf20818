"""The estimate of memory against embedded runs: largest resident sets of all processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.sizing.memory import job_memory
from areal_lora.families.shape import ModelShape
from tests.support.launcher.memory_runs import SHAPES, SHORT, measured
from tests.support.paths import EXAMPLES
from tests.support.sizes import NIGHTLY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOLERANCE = 0.10


@pytest.mark.skipif(not NIGHTLY, reason="three runs of a minute: only with AREAL_LORA_NIGHTLY=1")
@pytest.mark.parametrize("name", SHAPES)
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    peaks = measured(shape, tmp_path)
    paths = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    config = load_config(paths, [*SHORT, *shape.overrides])
    hf = json.loads((tmp_path / "model" / "config.json").read_text())
    memory = job_memory(config, ModelShape.from_hf(hf))
    needed = sum(process.host * len(process.nodes) for process in memory)
    found = {
        "trainer": sum(peaks.role("trainer")),
        "rollout": sum(peaks.role("server") + peaks.role("server worker")),
        "controller": sum(peaks.role("controller") + peaks.role("controller child")),
    }
    for role, nbytes in found.items():
        estimate = sum(m.host * len(m.nodes) for m in memory if m.role == role)
        print(f"{name}: {role}: estimate {estimate / 2**20:.0f} MiB, measured {nbytes / 2**20:.0f} MiB")
    print(f"{name}: all: estimate {needed / 2**20:.0f} MiB, measured {peaks.total / 2**20:.0f} MiB")
    assert needed == pytest.approx(peaks.total, rel=TOLERANCE)

"""``areal-lora plan --simulate``."""

from __future__ import annotations

import pytest

from areal_lora.cli import app
from tests.support.paths import EXAMPLES


def test_a_plan_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"--config={EXAMPLES / name}.yaml" for name in ("gsm8k_grpo_megatron_lora_moe", "embedded")]
    sizes = ["run.steps=4", "rollout.servers=2", "adapters.0.sampling.prompts_per_step=4"]
    assert app.main(["plan", "--simulate", "--gpus", "5", *files, *sizes]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for part in ("by arithmetic", "steps per hour", "staleness", "lost at half", "p99", "announce", "trainer ranks"):
        assert part in out

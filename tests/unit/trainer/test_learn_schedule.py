"""The learning rate over a run."""

from __future__ import annotations

import pytest

from areal_lora.config.models import OptimizerConfig
from areal_lora.trainer.learn import learning_rate

HALF = {"constant": 2.0, "linear": 1.0, "cosine": 1.0}
QUARTER = {"constant": 2.0, "linear": 1.5, "cosine": 1.0 + 0.5**0.5}


@pytest.mark.parametrize("schedule", list(HALF))
def test_learning_rate(schedule: str) -> None:
    config = OptimizerConfig.model_validate({"lr": 2.0, "warmup_steps": 4, "schedule": schedule})
    values = [learning_rate(config, step, 24) for step in (*range(25), 1000)]
    assert values[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert values[9] == pytest.approx(QUARTER[schedule])
    assert values[14] == pytest.approx(HALF[schedule])
    assert values[24] == pytest.approx(2.0 if schedule == "constant" else 0.0)
    assert values[25] == values[24]


@pytest.mark.parametrize("schedule", list(HALF))
@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_a_schedule_ends_at_its_floor(schedule: str, ratio: float) -> None:
    config = OptimizerConfig.model_validate({"lr": 2.0, "warmup_steps": 4, "schedule": schedule, "min_lr_ratio": ratio})
    values = [learning_rate(config, step, 24) for step in (*range(25), 1000)]
    assert values[:5] == [0.5, 1.0, 1.5, 2.0, 2.0], "a warm-up has no floor"
    assert values[9] == pytest.approx(2.0 * ratio + (1.0 - ratio) * QUARTER[schedule])
    assert values[24] == values[25] == pytest.approx(2.0 if schedule == "constant" else 2.0 * ratio)


def test_a_run_that_is_made_longer_follows_the_longer_schedule() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear")
    assert learning_rate(config, 10, 10) == 0.0
    assert learning_rate(config, 10, 20) == 0.5

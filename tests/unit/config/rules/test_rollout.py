"""Deterministic rollouts and what they exclude."""

from __future__ import annotations

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.guardrails import check
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
DETERMINISTIC = ("rollout.deterministic=true", "rollout.max_staleness=0")


def found(*overrides: str) -> list[str]:
    """Reasons and fixes of findings about the deterministic mode."""
    config = load_config(FILES, overrides)
    return [f"{f.reason}; {f.fix}" for f in check(config, Facts(hf_config=None)) if f.path == "rollout.deterministic"]


def test_the_embedded_run_can_be_deterministic() -> None:
    assert found(*DETERMINISTIC) == []


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("rollout.max_staleness=1", "rollout.max_staleness=0"),
        ("rollout.in_flight=interrupt", "in_flight=finish"),
        ("model.dtype=bfloat16", "model.dtype=float32"),
        ("cluster.device=cuda", "cluster.device=cpu"),
    ],
)
def test_each_thing_that_would_break_it_is_named(override: str, fix: str) -> None:
    (line,) = found(*DETERMINISTIC, override)
    assert override.replace("=", " = ") in line
    assert fix in line
    assert found(override) == [], "without the mode anything goes"


def test_all_of_them_are_one_line() -> None:
    (line,) = found("rollout.deterministic=true", "rollout.in_flight=interrupt", "model.dtype=bfloat16")
    assert line.count(" = ") == 3
    assert "\n" not in line

"""Rules about single adapters that no other test covers: learning rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check
from tests.support.paths import EXAMPLES

EMBEDDED = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
ON_GPUS = [*sorted(EXAMPLES.glob("gsm8k_grpo_*.yaml")), EXAMPLES / "one_gpu.yaml"]
AT = "adapters.0.optimizer.lr"


def found(*keys: str) -> list[str]:
    """Findings about the learning rate at alpha / rank = 1, unless ``keys`` set another one; none is an error."""
    findings = check(
        load_config(EMBEDDED, ["adapters.0.alpha=8", *(f"adapters.0.{key}" for key in keys)]), Facts(hf_config=None)
    )
    mine = [f for f in findings if f.path == AT]
    assert all(f.severity is Severity.WARNING for f in mine)
    return [f"{f.reason}; {f.fix}" for f in mine]


def test_a_rate_of_full_fine_tuning_is_noted_at_start() -> None:
    (line,) = found("optimizer.lr=3e-6")
    assert line.startswith("3e-06 is low for LoRA whose product is scaled by 1: ")
    assert "use 1e-5 to 5e-5" in line


@pytest.mark.parametrize(
    "keys",
    [
        ["optimizer.lr=1e-5"],
        ["optimizer.lr=3e-6", "alpha=16"],
        ["optimizer.lr=3e-6", "rslora=true"],
        ["optimizer.lr=3e-6", "optimizer.lora_plus_ratio=16"],
    ],
)
def test_larger_updates_are_not(keys: list[str]) -> None:
    assert found(*keys) == []


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_shipped_configurations_for_gpus_have_rates_for_lora(path: Path) -> None:
    (adapter,) = load_config([path]).adapters
    assert 1e-5 <= adapter.optimizer.lr <= 5e-5

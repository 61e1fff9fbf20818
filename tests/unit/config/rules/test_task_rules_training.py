"""Values that are accepted and seldom meant get a warning, and no other shipped value does."""

from __future__ import annotations

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.task_rules import seldom_meant
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
FACTS = Facts(hf_config=None)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["optimizer.lr=10"], ["optimizer.lr"]),
        (["sampling.prompts_per_step=100000"], ["sampling.prompts_per_step"]),
        (["sampling.prompts_per_step=10", "minibatches=4"], ["minibatches"]),
        (["sampling.prompts_per_step=10", "minibatches=5"], []),
        (["sampling.prompts_per_step=2", "minibatches=4"], []),
    ],
    ids=["shipped", "learning rate", "prompts", "unequal minibatches", "equal minibatches", "an error elsewhere"],
)
def test_a_value_that_is_seldom_meant_is_a_warning(overrides: list[str], keys: list[str]) -> None:
    found = list(seldom_meant(load_config(FILES, [f"adapters.0.{text}" for text in overrides]), FACTS))
    assert [finding.path for finding in found] == [f"adapters.0.{key}" for key in keys]
    assert {finding.severity for finding in found} <= {Severity.WARNING}

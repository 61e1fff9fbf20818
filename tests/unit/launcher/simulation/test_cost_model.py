"""Seconds of a simulated run: links of a broadcast, lengths of answers, a run that is too short."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from areal_lora.config.load import load_config
from areal_lora.errors import ConfigError
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.launcher.simulation.cost_model import arithmetic, scaled
from areal_lora.obs.metrics.records import RunMetrics
from tests.support.paths import EXAMPLES

CONFIG = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"])
COSTS = arithmetic(CONFIG, ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {}))


def test_a_root_of_a_tree_sends_once_for_each_level_and_a_ring_once() -> None:
    tree = replace(COSTS, tree=True, sources=1, nbytes=10**9, link_s=1e-9)
    assert [tree.wire_s(n) for n in (1, 7, 8, 511)] == pytest.approx([1.0, 3.0, 4.0, 9.0])
    ring = replace(tree, tree=False)
    assert ring.wire_s(511) == pytest.approx(1.0 + 510 * 50e-6)


def test_lengths_are_equal_for_equal_keys_and_have_the_mean() -> None:
    law = replace(COSTS, answer_tokens=100.0, sigma=0.5, longest=10_000)
    assert law.lengths("1 7", 4) == law.lengths("1 7", 4) != law.lengths("1 8", 4)
    assert fmean(law.lengths("1", 20_000)) == pytest.approx(100, rel=0.03)
    assert max(replace(law, longest=60).lengths("1", 100)) == 60


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2 training steps"):
        scaled(COSTS, RunMetrics(), COSTS, CONFIG)

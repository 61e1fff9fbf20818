"""The trainer's sizes as guardrails and engine judge them; single rules are in test_guardrails.py."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings, strategies as st

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import TrainerConfig
from areal_lora.config.rules.layout_rules import trainer_layout
from areal_lora.engine.common.arena import ParallelLayout, check_widths
from areal_lora.errors import ConfigError
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from tests.support.paths import EXAMPLES

CONFIG = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"])


@settings(max_examples=300, deadline=None, print_blob=True)
@given(
    kind=st.sampled_from(["Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen1.5-MoE-A2.7B"]),
    world=st.integers(1, 16),
    tp=st.integers(1, 9),
    pp=st.integers(1, 60) | st.just(2),
    ep=st.integers(1, 6),
    etp=st.integers(1, 6),
    pp_layers=st.none() | st.lists(st.integers(1, 24), min_size=1, max_size=3) | st.sampled_from([[12] * 4, [6] * 4]),
)
def test_trainer_sizes_are_refused_like_in_the_engine(kind: str, **sizes: Any) -> None:
    """The engine finds the same sizes wrong, only later, and sees dense models with expert parallelism as right."""
    hf = known_config(kind)
    shape = ModelShape.from_hf(hf or {})
    trainer = TrainerConfig(world_size=sizes.pop("world"), **sizes)
    found = trainer_layout(CONFIG.model_copy(update={"trainer": trainer}), Facts(hf_config=hf))
    wrong = [f.path for f in found if "dense" not in f.reason]
    try:
        ParallelLayout.of(trainer, layers=shape.layers, experts=shape.experts)
        check_widths(trainer, shape)
    except ConfigError:
        assert wrong or not shape.experts
    else:
        assert wrong == []

"""A run for any combination of the support table, and what the start-up check says of it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config, WorkerWorkflowConfig
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check
from areal_lora.config.sections.run import ServiceConfig
from areal_lora.config.support import Combination, Need
from areal_lora.families.registry import derive, supported
from areal_lora.types import ExpertLayout
from tests.support.paths import EXAMPLES

TINY = json.loads((EXAMPLES / "tiny_model" / "config.json").read_text())
FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"norm_topk_prob": False},
    **{kind: {"tie_word_embeddings": True} for kind in ("cohere", "cohere2")},
}
Refused = set[tuple[str, str]]


@cache
def example(*overrides: str) -> Config:
    return load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        ["adapters.0.target_modules=[all-linear]", "trainer.ep=1", *overrides],
    )


@cache
def facts_of(family: str, experts: bool) -> Facts:
    """A model of ``family``, as its config.json and, without a row, its checkpoint describe it."""
    hf = {**TINY, **FAMILY_KEYS.get(family, {}), "model_type": family}
    if family in supported():
        return Facts(hf_config=hf)
    paths = {"self_attn.qkv_proj": (64, 64), "mlp.down_proj": (64, 64)}
    if experts:
        paths |= {
            f"mlp.experts.{e}.{leaf}": (64, 64) for e in range(8) for leaf in ("gate_proj", "up_proj", "down_proj")
        }
    shapes = {f"model.layers.{i}.{path}.weight": shape for i in range(4) for path, shape in paths.items()}
    return Facts(hf_config=hf, checkpoint=derive(shapes, 4))


def config_of(c: Combination) -> Config:
    """A run with these choices and nothing else against it."""
    minimal: dict[Need, tuple[str, ...]] = {
        "several minibatches": ("adapters.0.minibatches=2",),
        "KL to the base": ("adapters.0.algorithm.kl_coef=0.1",),
        "KL to a version": (
            "adapters.0.algorithm.kl_coef=0.1",
            "adapters.0.algorithm.reference=initial",
            "adapters.0.algorithm.reference_refresh_steps=5",
        ),
        "entropy bonus": ("adapters.0.algorithm.entropy_coef=0.01",),
        "critic": ("adapters.0.algorithm.advantage=gae",),
        "greedy answers": ("adapters.0.algorithm.advantage=remax",),
        "given answers": ("adapters.0.sft.steps=2",),
    }
    asked = sorted(key for ask in c.needs for key in minimal.get(ask, ()))
    if c.algorithm == "dapo" and "greedy answers" in c.needs:
        asked.append("adapters.0.algorithm.drop_uniform=false")
    if c.algorithm == "distill" and not {"KL to the base", "KL to a version"} & c.needs:
        asked += [f"adapters.0.algorithm.reference.{key}" for key in ("url=http://teacher/v1", "model=large")]
    config = example(f"adapters.0.algorithm.kind={c.algorithm}", *asked)
    changes: dict[str, Any] = {}
    if c.layout == "none" and c.experts:
        changes["target_modules"] = ["attention"]
    elif c.layout != "none":
        changes["expert_layout"] = ExpertLayout(c.layout)
    if "an agent" in c.needs:
        changes["workflow"] = WorkerWorkflowConfig(kind="agent", path="agents.py:agent")
    adapter = config.adapters[0].model_copy(update=changes)
    service = ServiceConfig() if "a service" in c.needs else None
    twins = [adapter, adapter.model_copy(update={"name": "twin"})] if "several adapters" in c.needs else [adapter]
    return config.model_copy(
        update={
            "adapters": twins,
            "trainer": config.trainer.model_copy(update={"engine": c.engine}),
            "rollout": config.rollout.model_copy(
                update={"adapter_mode": c.mode, "max_adapters": 4 if service else None}
            ),
            "service": service,
        }
    )


def said(c: Combination) -> Refused:
    """Key and reason of every error that the start-up check finds."""
    findings = check(config_of(c), facts_of(c.family, c.experts))
    return {
        (f.path.replace("adapters.0.", "adapters.{i}."), f.reason) for f in findings if f.severity is Severity.ERROR
    }

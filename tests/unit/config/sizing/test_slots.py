from __future__ import annotations

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.sizing.slots import adapter_capacity, adapter_slots, kept_versions, slot_layout, slot_parameters
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.types import ExpertLayout
from tests.support.paths import EXAMPLES


def embedded(**rollout: object) -> Config:
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    return load_config(files, [f"rollout.{key}={value}" for key, value in rollout.items()])


@pytest.mark.parametrize("in_flight", ["finish", "interrupt", "keep"])
@pytest.mark.parametrize("max_staleness", range(4))
def test_one_adapter_has_its_versions_one_on_its_way_and_one_for_an_evaluation(
    in_flight: str, max_staleness: int
) -> None:
    config = embedded(in_flight=in_flight, max_staleness=max_staleness)
    assert (adapter_capacity(config), adapter_slots(config)) == (1, max_staleness + 3)
    assert kept_versions(config) == max_staleness + 1


@pytest.mark.parametrize(
    ("in_flight", "max_staleness", "slots", "kept"),
    [("interrupt", 0, 35, 1), ("interrupt", 2, 37, 1), ("keep", 2, 37, 1), ("finish", 0, 35, 1), ("finish", 2, 101, 3)],
)
def test_many_adapters_share_what_is_not_their_newest_version(
    in_flight: str, max_staleness: int, slots: int, kept: int
) -> None:
    config = embedded(in_flight=in_flight, max_staleness=max_staleness, max_adapters=33)
    assert (adapter_capacity(config), adapter_slots(config), kept_versions(config)) == (33, slots, kept)
    assert 33 * kept + 2 <= slots


@pytest.mark.parametrize(
    ("layout", "parallel", "experts"),
    [  # of a layer and rank on one of two workers: lora_A of gate and up, lora_B of both, lora_A and lora_B of down
        ("per_expert", "false", 128 * (2 * 2048 + 768 + 384 + 2048)),
        ("shared_outer", "false", 2 * 2048 + 128 * (768 + 384) + 2048),
        ("shared", "false", 2 * 2048 + 128 * (768 + 384) + 2048),
        ("shared_outer", "true", 2 * 2048 + 64 * (2 * 768 + 768) + 2048),
    ],
)
def test_a_slot_has_once_what_the_experts_of_all_adapters_share(layout: str, parallel: str, experts: int) -> None:
    values = [f"adapters.0.expert_layout={layout}", f"rollout.expert_parallel={parallel}", "rollout.tp=2"]
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], [*values, "rollout.max_lora_rank=32"])
    attention = 3 * 2048 + (4096 + 2 * 512) // 2 + 4096 // 2 + 2048
    shape = ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {})
    assert slot_parameters(config, shape) == 48 * 32 * (attention + experts)


def test_slots_have_experts_apart_where_one_adapter_has() -> None:
    """The third adapter, of attention, has no experts."""
    files = [EXAMPLES / "three_adapters.yaml"]
    assert slot_layout(load_config(files, [])) is ExpertLayout.PER_EXPERT
    outer = "adapters.experts.expert_layout=shared_outer"
    assert slot_layout(load_config(files, [outer])) is ExpertLayout.SHARED_OUTER
    assert (
        slot_layout(load_config(files, [outer, "adapters.shared.expert_layout=per_expert"])) is ExpertLayout.PER_EXPERT
    )

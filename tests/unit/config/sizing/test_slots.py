from __future__ import annotations

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.sizing.slots import adapter_capacity, adapter_slots, kept_versions
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

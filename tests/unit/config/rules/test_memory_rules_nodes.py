"""What a start on several nodes without Slurm needs of each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.guardrails import check
from areal_lora.errors import ConfigError
from areal_lora.families.registry import known_config
from tests.support.paths import EXAMPLES

MOE = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"]
FACTS = Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B"))


def found(facts: Facts, *overrides: str) -> list[str]:
    config = load_config(MOE, ["cluster.kind=nodes", *overrides])
    return [f"{finding.path}: {finding.reason}" for finding in check(config, facts)]


def test_a_configuration_for_slurm_runs_on_as_many_nodes() -> None:
    assert found(FACTS) == []


def test_a_node_has_its_own_devices_and_not_those_of_the_run() -> None:
    assert found(replace(FACTS, devices=8)) == []
    assert found(replace(FACTS, devices=7)) == ["cluster.device: 8 cuda devices are needed and 7 are visible here"]


def test_an_address_is_that_of_this_node_and_never_loopback() -> None:
    assert "cluster.bind: 3 nodes cannot reach each other on 127.0.0.1" in found(FACTS, "cluster.bind=127.0.0.1")
    problem = ConfigError("cluster.interface", "no address of this machine belongs to 'ib0'")
    where = ["cluster.interface=ib0"]
    expected = ["cluster.interface: no address of this machine belongs to 'ib0'"]
    assert found(replace(FACTS, address_problem=problem), *where) == expected


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_components_are_of_slurm_alone(role: str) -> None:
    parts = f"cluster.slurm.components=[{{roles: [{role}]}}]"
    assert any("has no components" in text for text in found(FACTS, parts, "cluster.nodes=1"))

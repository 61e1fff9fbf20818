"""What counts for an adapter: its own settings, else the run's."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.recorded import adapter_named, adapter_run, adapter_runs, conflict, probe_tolerance, steps_of
from areal_lora.config.rules.adapter_rules import adapter_list
from areal_lora.errors import ConfigError
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
OWN = {
    "steps": ("steps", "run.steps", 7),
    "seed": ("seed", "run.seed", 9),
    "max_staleness": ("max_staleness", "rollout.max_staleness", 0),
}


def load(*keys: str) -> Config:
    return load_config(FILES, list(keys))


@pytest.mark.parametrize("name", OWN)
def test_an_own_setting_counts_for_its_adapter_and_the_runs_for_the_others(name: str) -> None:
    key, of_run, value = OWN[name]
    config = load(f"adapters.0.{key}={value}")
    twin = load().adapters[0].model_copy(update={"name": "twin"})
    both = config.model_copy(update={"adapters": [config.adapters[0], twin]})
    own, other = (asdict(run) for run in adapter_runs(both).values())
    assert own[name] == value != other[name]
    assert {k: v for k, v in own.items() if k != name} == {k: v for k, v in other.items() if k != name}
    everyones = load(f"{of_run}={value}")
    assert asdict(adapter_run(everyones, everyones.adapters[0])) == own


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15), ("float16", 0.1)])
def test_wire_type_and_tolerance_are_those_of_the_base(dtype: str, tolerance: float) -> None:
    config = load(f"model.dtype={dtype}")
    assert (adapter_run(config, config.adapters[0]).wire_dtype, probe_tolerance(config)) == (dtype, tolerance)
    other = load(f"model.dtype={dtype}", "weight_sync.probe_tolerance=0.4")
    assert probe_tolerance(other) == 0.4


def test_servers_that_round_the_base_are_further_from_the_trainer() -> None:
    rounds = ["model.dtype=bfloat16", "rollout.engine_args.quantization=fp8_per_tensor"]
    assert probe_tolerance(load(*rounds)) == 0.3
    assert probe_tolerance(load(*rounds, "weight_sync.probe_tolerance=0.4")) == 0.4


def test_steps_of_all_adapters() -> None:
    config = load("run.steps=20", "adapters.0.steps=7")
    twin = load().adapters[0].model_copy(update={"name": "twin"})
    assert sum(steps_of(config.model_copy(update={"adapters": [config.adapters[0], twin]})).values()) == 27


def test_adapters_by_name() -> None:
    config = load()
    twin = config.adapters[0].model_copy(update={"name": "twin"})
    both = config.model_copy(update={"adapters": [config.adapters[0], twin]})
    assert adapter_named(config).name == "gsm8k"
    assert adapter_named(both, "twin") is twin
    with pytest.raises(ConfigError, match="the run has several: gsm8k, twin"):
        adapter_named(both)
    with pytest.raises(ConfigError, match="no adapter 'nobody'; it has gsm8k"):
        adapter_named(config, "nobody")


def test_servers_have_room_for_the_runs_staleness_only() -> None:
    facts = Facts(hf_config=None)
    assert not list(adapter_list(load("adapters.0.max_staleness=0"), facts))
    [finding] = adapter_list(load("rollout.max_staleness=1", "adapters.0.max_staleness=2"), facts)
    assert (finding.path, "rollout.max_staleness = 1" in finding.reason) == ("adapters.0.max_staleness", True)


def test_the_seed_that_counts_is_fixed_at_a_resume() -> None:
    assert conflict(load("run.seed=3"), load("run.seed=4", "adapters.0.seed=3")) is None
    error = conflict(load("run.seed=3"), load("run.seed=3", "adapters.0.seed=4"))
    assert error is not None
    assert (error.path, error.reason[:7]) == ("adapters.gsm8k.seed", "it is 4")

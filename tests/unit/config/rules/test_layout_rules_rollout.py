"""Deterministic and merged rollouts, and what they exclude."""

from __future__ import annotations

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check
from areal_lora.errors import ConfigError
from areal_lora.families.shape import read_hf_config
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
        ("rollout.adapter_mode=merged", "adapter_mode=unmerged"),
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


def merged(*overrides: str, **hf: object) -> dict[str, str]:
    """Findings by key with merged rollouts."""
    config = load_config([*FILES, EXAMPLES / "merged.yaml"], overrides)
    facts = Facts(hf_config=read_hf_config(EXAMPLES / "tiny_model") | hf)
    return {f.path: f"{f.reason}; {f.fix}" for f in check(config, facts) if f.severity is Severity.ERROR}


def test_merged_rollouts_need_one_value_and_no_rank_that_vllm_knows() -> None:
    assert merged() == {}
    assert merged("rollout.max_lora_rank=7", "adapters.gsm8k.rank=9") == {}


def test_merged_rollouts_on_a_cpu_keep_experts_on_every_worker() -> None:
    found = merged("rollout.expert_parallel=true", "rollout.tp=2")
    assert "ends the process" in found["rollout.expert_parallel"]
    assert "adapter_mode=unmerged" in found["rollout.expert_parallel"]


def test_merged_rollouts_have_no_cache_of_another_version_to_keep() -> None:
    found = merged("rollout.in_flight=keep")
    assert list(found) == ["rollout.in_flight"]
    assert "interrupt" in found["rollout.in_flight"]
    assert merged("rollout.in_flight=interrupt") == {}


def test_servers_must_hold_all_adapters_of_the_list() -> None:
    config = load_config(FILES, ["rollout.max_adapters=1"])
    assert [f for f in check(config, Facts(hf_config=None)) if f.path == "rollout.max_adapters"] == []
    twice = config.model_copy(update={"adapters": config.adapters * 2})
    (line,) = [f for f in check(twice, Facts(hf_config=None)) if f.path == "rollout.max_adapters"]
    assert "hold 1 adapters, 2 are listed" in line.reason


def test_an_argument_of_the_engine_that_another_key_decides_is_named() -> None:
    config = load_config(FILES, ["rollout.engine_args={max_loras: 2, enforce_eager: true}"])
    [line] = [f for f in check(config, Facts(hf_config=None)) if f.path.startswith("rollout.engine_args")]
    assert (line.path, line.reason) == ("rollout.engine_args.max_loras", "rollout.max_adapters decides it")
    assert "rollout.engine_args.fully_sharded_loras" in merged("rollout.engine_args.fully_sharded_loras=true")
    assert "rollout.engine_args.quantization" in merged("rollout.engine_args.quantization=fp8")
    assert merged("rollout.engine_args.moe_backend=flashinfer_cutlass") == {}


def replayed(*overrides: str, value: str = "rollout", **hf: object) -> str:
    """What is wrong with ``behaviour.router_replay``."""
    config = load_config(FILES, [f"behaviour.router_replay={value}", *overrides])
    facts = Facts(hf_config=read_hf_config(EXAMPLES / "tiny_model") | hf)
    return "; ".join(f"{f.reason}: {f.fix}" for f in check(config, facts) if f.path == "behaviour.router_replay")


@pytest.mark.parametrize(
    ("overrides", "hf", "reason"),
    [
        ((), {"model_type": "qwen3"}, "the model is dense"),
        (("adapters.gsm8k.sft.steps=1000000",), {}, "given answers"),
        (("cluster.device=npu",), {}, "returns no routes on NPUs"),
        (("cluster.device=cuda", "rollout.deterministic=true"), {}, "deterministic switches vLLM's prefix cache off"),
        (("rollout.adapter_mode=merged",), {}, "set rollout.adapter_mode=unmerged, or set it to off"),
        (("rollout.engine_args={additional_config: {a: 1}}",), {}, "additional_config replaces the setting"),
    ],
)
def test_routes_are_replayed_where_servers_return_them(
    overrides: tuple[str, ...], hf: dict[str, object], reason: str
) -> None:
    assert replayed() == ""
    assert replayed("adapters.gsm8k.sft.steps=1") == replayed("cluster.device=cuda") == ""
    assert reason in replayed(*overrides, **hf)
    assert replayed(*overrides, value="off", **hf) == ""


@pytest.mark.parametrize(
    ("overrides", "hf", "reason"),
    [
        ((), {}, "no step has a proximal pass"),
        (
            ("adapters.gsm8k.algorithm.kind=cispo", "adapters.gsm8k.minibatches=2"),
            {},
            "no behaviour_correction=in_ratio",
        ),
        (("adapters.gsm8k.minibatches=2",), {"model_type": "qwen3"}, "the model is dense"),
        (("adapters.gsm8k.minibatches=2", "adapters.gsm8k.sft.steps=1000000"), {}, "no ratio moves"),
    ],
)
def test_own_routes_need_a_pass_that_records_them(
    overrides: tuple[str, ...], hf: dict[str, object], reason: str
) -> None:
    assert reason in replayed(*overrides, value="old", **hf)


def test_own_routes_need_nothing_of_servers() -> None:
    merged = ("cluster.device=cuda", "rollout.adapter_mode=merged", "rollout.engine_args={additional_config: {a: 1}}")
    assert replayed("adapters.gsm8k.minibatches=2", *merged, value="old") == ""


def test_yaml_reads_a_plain_off_as_false() -> None:
    assert load_config(FILES, ["behaviour.router_replay=off"]).behaviour.router_replay == "off"
    assert load_config(FILES, ["behaviour.router_replay='off'"]).behaviour.router_replay == "off"
    with pytest.raises(ConfigError, match=r"behaviour\.router_replay"):
        load_config(FILES, ["behaviour.router_replay=on"])

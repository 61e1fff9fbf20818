"""A base that vLLM quantises while it loads: what it refuses, and what the trainer cannot repeat."""

from __future__ import annotations

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check
from areal_lora.families.registry import known_config
from tests.support.paths import EXAMPLES

JOB = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
DENSE, MOE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"


def found(*overrides: str, model: str = MOE) -> list[tuple[str, Severity, str]]:
    """Findings that name the quantisation."""
    config = load_config([JOB], [f"rollout.engine_args.quantization={overrides[0]}", *overrides[1:]])
    findings = check(config, Facts(hf_config=known_config(model)))
    return [(f.path, f.severity, f.reason) for f in findings if "quantis" in f.reason or "cannot round" in f.reason]


@pytest.mark.parametrize("kind", ["fp8_per_channel", "fp8_per_tensor"])
def test_gpus_round_mixtures_and_dense_models(kind: str) -> None:
    assert found(kind) == found(kind, model=DENSE) == []


def test_a_base_in_float32_is_not_quantised() -> None:
    [line] = found("fp8_per_channel", "model.dtype=float32", "cluster.device=cpu", model=DENSE)
    assert line[:2] == ("model.dtype", Severity.ERROR)


@pytest.mark.parametrize(
    ("kind", "model", "refused"),
    [("fp8_per_channel", DENSE, False), ("fp8_per_channel", MOE, True), ("fp8_per_tensor", DENSE, True)],
)
def test_cpus_round_linear_layers_by_channel(kind: str, model: str, refused: bool) -> None:
    lines = found(kind, "cluster.device=cpu", model=model)
    assert [line[:2] for line in lines] == [("rollout.engine_args.quantization", Severity.ERROR)] * refused


def test_the_bill_and_the_plan_do_not_know_other_ways() -> None:
    [(path, severity, reason)] = found("mxfp8")
    assert (path, severity) == ("rollout.engine_args.quantization", Severity.WARNING)
    assert "mxfp8" in reason
    assert "numerics" in reason


@pytest.mark.parametrize(
    ("keys", "refused"), [((4,), True), ((2,), False), ((4, "rollout.expert_parallel=true"), False)]
)
def test_experts_that_vllm_pads_to_whole_blocks_have_no_slots(keys: tuple[int, str], refused: bool) -> None:
    """768 columns: 192 on each of 4 devices."""
    tp, *more = keys
    overrides = ["rollout.engine_args.quantization=fp8_per_block", f"rollout.tp={tp}", "rollout.servers=1", *more]
    findings = check(load_config([JOB], overrides), Facts(hf_config=known_config(MOE)))
    assert [f.severity for f in findings if "from 192 columns to whole blocks of 128" in f.reason] == (
        [Severity.ERROR] * refused
    )

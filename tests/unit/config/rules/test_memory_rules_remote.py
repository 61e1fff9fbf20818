"""Rules of a run in which servers elsewhere serve, and what it adds to the plan."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from areal_lora.config.facts import Facts, gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.rules.guardrails import check
from areal_lora.config.sizing.memory import GIB, host_bytes
from areal_lora.families.registry import known_config
from areal_lora.launcher.dry_run import ports, print_plan
from areal_lora.launcher.plan import REMOTE, make_plan
from tests.support.paths import EXAMPLES


def serving(*overrides: str) -> Config:
    return load_config([{"rollout": {"remote": {}}}, EXAMPLES / "service.yaml"], overrides)


def findings(config: Config) -> list[str]:
    return [finding.path for finding in check(config, gather_facts(config, runs_here=False))]


def test_a_gateway_is_a_process_of_the_run() -> None:
    config = serving("rollout.remote.port=4711")
    assert findings(config) == []
    plan = make_plan(config, gather_facts(config, runs_here=False))
    [gateway] = plan.role(REMOTE)
    assert gateway.argv[2] == "areal_lora.engine.vllm_ext.remote.remote_gateway"
    assert [(host, port) for process, _, host, port in ports(config) if process == "remote-0"] == [
        ("127.0.0.1", "4711")
    ]


@pytest.mark.parametrize(("store", "versions"), [(None, 3), ("s3://bucket/runs", 2)])
def test_the_plan_counts_the_versions_that_the_gateway_holds(store: str | None, versions: int) -> None:
    """Two of the only adapter and one that arrives; or one that arrives, and its copy for the store."""
    remote, file = {"rollout": {"remote": {"store": store}}}, EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
    facts = Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B"))
    plan, without = (make_plan(load_config([*more, file], ["run.steps=1"]), facts) for more in ([remote], []))
    # Of 48 layers at rank 32 in bfloat16: qkv and o, gate with up and down of 128 experts.
    version = 2 * 32 * 48 * ((2048 + 40 * 128) + (32 * 128 + 2048) + 128 * ((2048 + 2 * 768) + (768 + 2048)))
    [gateway] = [memory for memory in plan.memory if memory.role == REMOTE]
    assert [part.host for part in gateway.parts if part.name == "versions"] == [versions * version]
    totals = [host_bytes(each.memory, gateway.nodes[0]) for each in (without, plan)]
    assert totals[1] - totals[0] == gateway.host
    out = io.StringIO()
    print_plan(load_config([remote, file], ["run.steps=1"]), plan, Console(file=out, width=200))
    [line] = [line for line in out.getvalue().splitlines() if "│ gateway " in line]
    assert f" {gateway.host / GIB:.1f} " in line


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (("rollout.remote.host=0.0.0.0",), "rollout.remote.certificate"),
        (("weight_sync.backend=nccl", "cluster.device=cuda"), "weight_sync.backend"),
    ],
)
def test_what_it_refuses(overrides: tuple[str, ...], path: str) -> None:
    assert path in findings(serving(*overrides))
    assert "rollout.remote.certificate" not in findings(serving(*overrides, "rollout.remote.certificate=run.pem"))

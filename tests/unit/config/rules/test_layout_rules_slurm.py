"""Contradictions in what Slurm is asked for: each is one line with the key, the reason and the fix."""

from __future__ import annotations

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check
from areal_lora.families.registry import known_config
from tests.support.paths import EXAMPLES

MOE = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"]
FACTS = Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B"))
TRAIN, SAMPLE, CONTROL = "{roles: [trainer], nodes: 2}", "{roles: [rollout]}", "{roles: [controller]}"
SLURM = "cluster.slurm"
WORKERS = "adapters.0.workflow={kind: gym, env: 'env.py:Env', workers: 2}"


def components(*parts: str) -> list[str]:
    return ["cluster.nodes=1", f"cluster.slurm.components=[{', '.join(parts)}]"]


# fmt: off
# ruff: noqa: E501
CONTRADICTIONS: list[tuple[list[str], str, str]] = [
    (components(TRAIN, SAMPLE), f"{SLURM}.components", "no component has the role controller"),
    (components(TRAIN, SAMPLE, CONTROL, "{roles: [rollout, controller]}"), f"{SLURM}.components.3.roles", "is named 2 times"),
    ([*components(TRAIN, SAMPLE, CONTROL), "cluster.kind=local"], f"{SLURM}.components", "cluster.kind = local has no components"),
    ([*components(TRAIN, SAMPLE, CONTROL), "cluster.nodes=3"], "cluster.nodes", "3 nodes contradict the components, which have 4"),
    (components(TRAIN, "{roles: [rollout], devices_per_node: 0}", CONTROL), f"{SLURM}.components.1.devices_per_node", "rollout need cuda devices"),
    (components(TRAIN, SAMPLE, "{roles: [controller], nodes: 2}"), f"{SLURM}.components.2.nodes", "one process"),
    (components("{roles: [trainer]}", SAMPLE, CONTROL), f"{SLURM}.components.0.nodes", "16 devices are needed (16 trainer) and 8 are declared"),
    (components(TRAIN, "{roles: [rollout], devices_per_node: 1, nodes: 8}", CONTROL), "rollout.tp", "does not fit a node of 1"),
    (["trainer.world_size=4", "trainer.ep=4", "rollout.tp=8", "rollout.servers=2", "cluster.nodes=2", "rollout.expert_parallel=true"], "cluster.nodes", "20 devices are needed"),
    (["trainer.world_size=4", "trainer.ep=4", "rollout.tp=8", "rollout.servers=2", "cluster.nodes=2", "cluster.devices_per_node=10", "rollout.expert_parallel=true"], "cluster.nodes", "server 1 of 8 devices has no room"),
    (components(TRAIN, SAMPLE, CONTROL, "{roles: [environment]}", "{roles: [environment]}"), f"{SLURM}.components.4.roles", "is named 2 times"),
    ([f"{SLURM}.extra=[--mem=8G]"], f"{SLURM}.extra", "use cluster.slurm.mem"),
    ([f"{SLURM}.extra=[-p gpu]"], f"{SLURM}.extra", "use cluster.slurm.partition"),
    ([f"{SLURM}.extra=[--no-requeue]"], f"{SLURM}.extra", "depends on it"),
    ([f"{SLURM}.extra=[--clusters=other]"], f"{SLURM}.extra", "'--clusters=other' makes a job of another cluster"),
    ([f"{SLURM}.extra=[-Mother]"], f"{SLURM}.extra", "SLURM_CONF"),
    ([f"{SLURM}.extra=['#SBATCH --wckey=a']"], f"{SLURM}.extra", "without #SBATCH"),
    ([f"{SLURM}.gres_type=h100", "cluster.device=cpu", "rollout.tp=1", "cluster.devices_per_node=6"], f"{SLURM}.gres_type", "contradict cluster.device = cpu"),
    ([f"{SLURM}.srun_extra.rollout=[--gpu-bind=closest]"], f"{SLURM}.srun_extra.rollout", "hides devices"),
    ([f"{SLURM}.srun_extra.trainer=['--gpu-bind verbose,single:1']"], f"{SLURM}.srun_extra.trainer", "hides devices"),
    (["cluster.min_servers=5"], "cluster.min_servers", "rollout.servers = 4"),
]
# fmt: on


@pytest.mark.parametrize(("overrides", "key", "words"), CONTRADICTIONS, ids=[row[2] for row in CONTRADICTIONS])
def test_contradiction(overrides: list[str], key: str, words: str) -> None:
    findings = check(load_config(MOE, overrides), FACTS)
    assert [f.path for f in findings] == [key], "one mistake, one line"
    line = str(findings[0].error())
    assert findings[0].severity is Severity.ERROR
    assert "\n" not in line
    assert "fix:" in line
    assert words in line


def test_every_contradiction_is_reported_at_once() -> None:
    overrides = [f"{SLURM}.extra=[--mem=8G]", "cluster.min_servers=5", "cluster.nodes=2"]
    found = {f.path for f in check(load_config(MOE, overrides), FACTS)}
    assert found == {f"{SLURM}.extra", "cluster.min_servers", "cluster.nodes"}


def test_a_node_without_a_process_is_a_warning() -> None:
    (finding,) = check(load_config(MOE, ["cluster.nodes=4"]), FACTS)
    assert (finding.severity, finding.path) == (Severity.WARNING, "cluster.nodes")
    assert "nothing runs on 1 of 4 nodes (node 3)" in finding.reason
    overrides = [*components(TRAIN, SAMPLE, CONTROL, "{roles: [environment], nodes: 3}"), WORKERS]
    (finding,) = check(load_config(MOE, overrides), FACTS)
    assert "nothing runs on 1 of 3 nodes (node 6)" in finding.reason


@pytest.mark.parametrize(
    "overrides",
    [
        components(TRAIN, SAMPLE, CONTROL),
        [*components(TRAIN, SAMPLE, CONTROL, "{roles: [environment], nodes: 2}"), WORKERS],
        components("{roles: [trainer, controller], nodes: 2}", SAMPLE),
        [*components(TRAIN, SAMPLE, CONTROL), "cluster.nodes=4"],
        [f"{SLURM}.extra=[--wckey=a, --licenses=x:1]", f"{SLURM}.mem='0'", f"{SLURM}.time_limit=1-12:00:00"],
    ],
)
def test_allowed(overrides: list[str]) -> None:
    assert check(load_config(MOE, overrides), FACTS) == ()

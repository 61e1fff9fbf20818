from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.families.registry import known_config
from areal_lora.launcher.plan import make_plan
from areal_lora.launcher.slurm import job_query, job_steps
from tests.support.paths import EXAMPLES


def test_tasks_that_were_killed_together_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They record no codes: with a wait for each one, 500 servers held the supervisor for minutes."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    killed = SimpleNamespace(poll=lambda: 137)
    monkeypatch.setattr(job_steps, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(
        job_steps, "subprocess", SimpleNamespace(Popen=lambda *_, **__: killed, DEVNULL=None, STDOUT=None)
    )
    monkeypatch.setattr(job_query, "lost_nodes", lambda hosts: ())
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], [f"run.root={tmp_path}", "run.name=mine"])
    plan = make_plan(config, Facts(hf_config=known_config(config.model.path)))
    hosts = tuple(f"n{i}" for i in range(1 + max(spec.node for spec in plan.processes)))
    job = job_query.Allocation(job="1", components=("1",), restarts=0, hosts=hosts)
    servers = plan.role("server")
    plan.run_folder.logs.mkdir(parents=True)
    steps = job_steps.SlurmSteps(config, plan, job)
    steps.start(servers)
    ended = steps.poll()
    assert len(ended) == len(servers) > 2
    assert {each.code for each in ended} == {-9}
    assert job_steps.RECORD_S <= now < 2 * job_steps.RECORD_S

from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.families.registry import known_config
from areal_lora.launcher.plan import make_plan
from areal_lora.launcher.slurm import job_query, job_steps
from tests.support.paths import EXAMPLES


def test_tasks_have_the_scripts_own_variables_where_sbatch_exported_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert "SLURM_EXPORT_ENV" not in job_steps._environment()
    assert job_steps._environment()["SLURM_JOB_ID"] == "1"


def test_tasks_that_were_killed_together_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They record no codes: with a wait for each one, 500 servers held the supervisor for minutes."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    waits = [False]
    killed = SimpleNamespace(poll=lambda: None if waits[0] else 137, send_signal=lambda _: None)
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
    # Their node does not answer: they outlive all signals.
    steps.start(servers)
    waits[0], now = True, 0.0
    monkeypatch.setattr(job_query, "step_ids", lambda jobs: {})
    steps.end(servers)
    limit_s = job_steps.KILL_S + 2 * job_steps.SRUN_S + job_steps.RECORD_S
    assert limit_s - 1 < now < limit_s + 1, "of one, not of each"

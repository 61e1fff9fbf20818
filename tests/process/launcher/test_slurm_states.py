"""States of jobs as a real slurmctld reports them, and ``areal-lora status`` and ``stop`` on a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.launcher.slurm.job_query import look
from areal_lora.launcher.slurm.states import JobRecord, Phase, explain
from tests.support.cli.command import areal_lora
from tests.support.launcher.real_slurm import NODES, Slurm
from tests.support.obs.fake_run import make_config, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def environment(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])


def submitted(slurm: Slurm, command: str, *options: str) -> str:
    return slurm.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}")


def until(slurm: Slurm, job: str, state: str, reason: str = "") -> JobRecord:
    def reached() -> bool:
        record = look(job)
        return record.state == state and record.reason.startswith(reason)

    slurm.until(f"job {job} to be {state} {reason}; it is {look(job)}", reached)
    return look(job)


def test_ends_of_jobs(slurm: Slurm) -> None:
    done, refused, killed = (submitted(slurm, f"sleep 0.2; {c}") for c in ("true", "exit 65", "kill -SEGV $$"))
    gone = submitted(slurm, "sleep 600")
    until(slurm, gone, "RUNNING")
    slurm.run("scancel", gone)
    assert explain(until(slurm, done, "COMPLETED")).phase is Phase.OVER
    assert "violated a contract" in explain(until(slurm, refused, "FAILED")).what
    assert "signal 11" in explain(until(slurm, killed, "FAILED")).what or look(killed).code == 139
    assert "was cancelled" in explain(until(slurm, gone, "CANCELLED")).what
    assert "does not know job 99999" in explain(look("99999")).what


def test_a_lost_node_and_a_preemption(slurm: Slurm) -> None:
    lost = submitted(slurm, "sleep 600", "--no-requeue", "--nodelist=n4", "--exclusive")
    until(slurm, lost, "RUNNING")
    slurm.run("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=test")
    assert "node of the job failed" in explain(until(slurm, lost, "NODE_FAIL")).what
    slurm.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=test")
    try:
        absent = submitted(slurm, "true", "--nodelist=n4")
        assert "down, drained or reserved" in explain(until(slurm, absent, "PENDING", "ReqNodeNotAvail")).what
        slurm.run("scancel", absent)
    finally:
        slurm.run("scontrol", "update", "NodeName=n4", "State=RESUME")
    low = submitted(slurm, "sleep 600", "--no-requeue", "--nodelist=n3", "--exclusive")
    until(slurm, low, "RUNNING")
    high = submitted(slurm, "sleep 0.2", "--partition=high", "--nodelist=n3", "--exclusive")
    assert "higher priority took the nodes" in explain(until(slurm, low, "PREEMPTED")).what
    until(slurm, high, "COMPLETED")


def test_reasons_to_wait(slurm: Slurm) -> None:
    full = submitted(slurm, "sleep 600", "--partition=high", f"--nodes={NODES}", "--exclusive")
    until(slurm, full, "RUNNING")
    waiting = {
        "Resources": submitted(slurm, "true", "--partition=high", f"--nodes={NODES}"),
        "Dependency": submitted(slurm, "true", f"--dependency=afterok:{full}"),
        "BeginTime": submitted(slurm, "true", "--begin=now+1hour"),
        "JobHeldUser": submitted(slurm, "true", "--hold"),
    }
    for reason, job in waiting.items():
        text = explain(until(slurm, job, "PENDING", reason))
        assert text.phase is Phase.WAITING
        assert text.what.startswith("the job waits: ")
    slurm.run("scontrol", "suspend", full)
    assert "suspended" in explain(until(slurm, full, "SUSPENDED")).what
    slurm.run("scontrol", "resume", full)
    slurm.run("scancel", full, *waiting.values())


def test_status_and_stop_of_a_job(slurm: Slurm, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a run", steps=3)
    config = make_config()
    cluster = config.cluster.model_copy(update={"kind": "slurm"})
    (folder / "config.json").write_text(config.model_copy(update={"cluster": cluster}).model_dump_json())
    job = submitted(slurm, "trap 'exit 0' TERM; while true; do sleep 0.1; done", "--nodelist=n2")
    (folder / "job.id").write_text(f"{job}\n")
    until(slurm, job, "RUNNING")
    seen = json.loads(areal_lora("status", folder, "--json").stdout)
    assert (seen["state"], seen["job"]["state"], seen["job"]["nodes"]) == ("running", "RUNNING", "n2")
    stopped = areal_lora("stop", folder)
    assert stopped.returncode == 0, stopped.stderr
    assert f"scancel {job}" in stopped.stdout
    assert "was cancelled" in stopped.stdout.splitlines()[-1]
    assert "CANCELLED" in areal_lora("status", folder).stdout
    again = areal_lora("stop", folder)
    assert (again.returncode, again.stdout) == (0, f"Job {job} is over: the job was cancelled.\n")

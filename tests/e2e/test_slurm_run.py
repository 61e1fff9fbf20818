"""The embedded run as a job of a real Slurm: two trainer ranks on one node, two servers on the other.

One job: a server is killed, then a rank, then the job is signalled and requeued, and it ends well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_lora.obs.report.summary import read_summary
from areal_lora.run_folder.events import RequeueEvent, count_restarts, read_events
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint
from tests.support.cli.command import forked_python
from tests.support.launcher.command import embedded_run, forked_roles
from tests.support.launcher.real_slurm import Slurm
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS, UP_S, STEP_S = 26, 400.0, 300.0  # steps enough for two deaths and a requeue, however slow the commands are


def steps(folder: Path) -> list[dict[str, Any]]:
    """The steps of all sessions, repeated ones as often as they were made."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record for record in records if record["kind"] == "step"]


def test_it_learns_and_survives_a_killed_server_a_killed_rank_and_a_requeue(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    command = embedded_run(
        f"run.root={tmp_path}",
        "run.name=job",
        f"run.steps={STEPS}",
        "eval.every_steps=0",
        "cluster.kind=slurm",
        "cluster.nodes=2",
        "cluster.bind=0.0.0.0",
        "rollout.servers=2",
        "adapters.gsm8k.sampling.prompts_per_step=24",
        "adapters.gsm8k.task.n_eval=64",
        *forked_roles(tmp_path, "trainer.python", "rollout.python"),  # the controller is a new interpreter
    )
    done = subprocess.run(command, env=slurm.environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    job = (folder / "job.id").read_text().strip()

    def log() -> str:
        path = folder / "logs" / f"job-{job}.log"
        return path.read_text() if path.exists() else ""

    def until(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{log()}"
            assert slurm.state(job) != "FAILED", log()
            time.sleep(0.2)

    def next_step_after_a_death(role: str, index: int) -> float:
        before, killed_at = len(steps(folder)), time.monotonic()
        endpoint = read_endpoint(RunFolder.current(folder), role, index)
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        until(f"{role} again", lambda: f"{role}-{index} was killed by SIGKILL" in log(), STEP_S)
        until("a step after it", lambda: len(steps(folder)) > before + (role == "server"), STEP_S)
        return time.monotonic() - killed_at

    until("the second step", lambda: len(steps(folder)) >= 2, UP_S)
    status = slurm.run(forked_python(), "-m", "areal_lora", "status", str(folder))
    for words in (f"{job} RUNNING on n[1-2]", "trainer-1     n1", "server-1      n2", "controller-0", f"/{STEPS} "):
        assert words in status, status
    assert "trainer-0" in slurm.run(forked_python(), "-m", "areal_lora", "logs", str(folder), "-n", "2")
    print(f"\nserver killed: next steps after {next_step_after_a_death('server', 1):.1f} s")
    print(f"rank killed: next step after {next_step_after_a_death('trainer', 0):.1f} s")
    assert count_restarts(RunFolder(folder)) == {"server-1": 1, "trainer": 1}
    assert slurm.job(job)["Restarts"] == "0"

    asked_at, before = time.monotonic(), len(steps(folder))
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    until("the requeue", lambda: slurm.job(job)["Restarts"] == "1", STEP_S)
    print(f"requeued {time.monotonic() - asked_at:.1f} s after USR1, {before} steps done")
    slurm.until_requeued(job)
    until("the resume", lambda: len(steps(folder)) > before, UP_S)
    again = [record["step"] for record in steps(folder)]
    print(f"after the requeue: {again.count(again[before - 1]) - 1} finished steps repeated")
    assert again[before:].count(again[before - 1]) <= 1
    ended = slurm.until_over(job, UP_S)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), log()

    done_steps = [record["step"] for record in steps(folder)]
    assert sorted(set(done_steps)) == list(range(STEPS))
    assert len(done_steps) - STEPS <= 2, f"at most one step is repeated by each of two interruptions: {done_steps}"
    summary = read_summary(folder)
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    assert summary.eval_after > summary.eval_before + 0.1, "it learns"
    assert (summary.steps, summary.restarts, summary.requeues) == (STEPS, {"server-1": 1, "trainer": 1}, 1)
    [event] = [event for event in read_events(RunFolder(folder)) if isinstance(event, RequeueEvent)]
    assert (event.job, event.why, event.without) == (job, "USR1 arrived", 0), "there was a new checkpoint"
    assert "requeued: USR1 arrived" in (folder / "report.html").read_text()
    assert f"result   {STEPS} steps" in log(), "the closing lines"
    slurm.until("the end of all processes of jobs", lambda: slurm.processes() == [])

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
from tests.support.launcher.command import configs, forked_run
from tests.support.launcher.real_slurm import Slurm
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS, PROMPTS, SAMPLES, WAIT_S = 24, 16, 8, 280.0
HELD_BACK = """
import pathlib, time
has = {"turn": "", "left": 0}

def reward(completion, answer):
    while has["left"] == 0:
        turn, answers = (pathlib.Path(__file__).parent / "gate" / "allowed").read_text().split()
        if turn != has["turn"]:
            has.update(turn=turn, left=int(answers))
        else:
            time.sleep(0.1)
    has["left"] -= 1
    return float(completion.rpartition("####")[2].strip() == answer)
"""


def steps(folder: Path) -> list[dict[str, Any]]:
    """The steps of all sessions, repeated ones as often as they were made."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record for record in records if record["kind"] == "step"]


def test_it_learns_and_survives_a_killed_server_a_killed_rank_and_a_requeue(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (tmp_path / "held_back.py").write_text(HELD_BACK)
    reward = f"{{kind: function, path: '{tmp_path}/held_back.py:reward', timeout_s: 1500}}"
    (tmp_path / "held_back.yaml").write_text(f"adapters: [{{reward: {reward}}}]\n")

    def allow(turn: str, n_steps: int) -> None:
        """However slow this test is, answers of so many steps are scored before the next turn."""
        new = tmp_path / "gate" / "new"
        new.write_text(f"{turn} {n_steps * PROMPTS * SAMPLES}")
        new.replace(tmp_path / "gate" / "allowed")

    (tmp_path / "gate").mkdir()
    allow("start", 5)  # the evaluation is one of them
    command = forked_run(
        tmp_path,
        *configs("held_back", folder=tmp_path),
        f"run.root={tmp_path}",
        "run.name=job",
        f"run.steps={STEPS}",
        "eval.every_steps=0",
        "cluster.kind=slurm",
        "cluster.nodes=2",
        "cluster.bind=0.0.0.0",
        "rollout.servers=2",
        f"adapters.gsm8k.sampling.n_samples={SAMPLES}",
        f"adapters.gsm8k.sampling.prompts_per_step={PROMPTS}",
        "adapters.gsm8k.task.n_eval=128",
    )
    done = subprocess.run(command, env=slurm.environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    job = (folder / "job.id").read_text().strip()

    def log() -> str:
        path = folder / "logs" / f"job-{job}.log"
        return path.read_text() if path.exists() else ""

    def until(what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{log()}"
            assert slurm.state(job) != "FAILED", log()
            time.sleep(0.2)

    def next_step_after_a_death(role: str, index: int) -> float:
        before, killed_at = len(steps(folder)), time.monotonic()
        allow(role, 6)  # after the trainer's death some are scored again
        endpoint = read_endpoint(RunFolder.current(folder), role, index)
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        until(f"{role} again", lambda: f"{role}-{index} was killed by SIGKILL" in log())
        until("a step after it", lambda: len(steps(folder)) > before + (role == "server"))
        return time.monotonic() - killed_at

    areal_lora = (forked_python(), "-m", "areal_lora")
    until("the second step", lambda: len(steps(folder)) >= 2)
    status = slurm.run(*areal_lora, "status", str(folder))
    for words in (f"{job} RUNNING on n[1-2]", "trainer-1     n1", "server-1      n2", "controller-0", f"/{STEPS} "):
        assert words in status, status
    assert "trainer-0" in slurm.run(*areal_lora, "logs", str(folder), "-n", "2")
    print(f"\nserver killed: next steps after {next_step_after_a_death('server', 1):.1f} s")
    print(f"rank killed: next step after {next_step_after_a_death('trainer', 0):.1f} s")
    assert count_restarts(RunFolder(folder)) == {"server-1": 1, "trainer": 1}
    assert slurm.job(job)["Restarts"] == "0"

    asked_at, before = time.monotonic(), len(steps(folder))
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    until("the requeue", lambda: slurm.job(job)["Restarts"] == "1")
    allow("end", 100)
    print(f"requeued {time.monotonic() - asked_at:.1f} s after USR1, {before} steps done")
    slurm.until_requeued(job)
    until("the resume", lambda: len(steps(folder)) > before)
    again = [record["step"] for record in steps(folder)]
    print(f"after the requeue: {again.count(again[before - 1]) - 1} finished steps repeated")
    assert again[before:].count(again[before - 1]) <= 1
    ended = slurm.until_over(job, WAIT_S)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), log()

    done_steps = [record["step"] for record in steps(folder)]
    assert sorted(set(done_steps)) == list(range(STEPS))
    assert len(done_steps) - STEPS <= 2, f"at most one step is repeated by each of two interruptions: {done_steps}"
    summary = read_summary(folder)
    assert summary.eval_after is not None
    # The first evaluation may be held back until the requeue, which ends it.
    first = steps(folder)[0]["metrics"]["train/reward_mean"]
    assert summary.eval_after > first + 0.1, "it learns"
    assert (summary.steps, summary.restarts, summary.requeues) == (STEPS, {"server-1": 1, "trainer": 1}, 1)
    [event] = [event for event in read_events(RunFolder(folder)) if isinstance(event, RequeueEvent)]
    assert (event.job, event.why, event.without) == (job, "USR1 arrived", 0), "there was a new checkpoint"
    assert "requeued: USR1 arrived" in (folder / "report.html").read_text()
    assert f"result   {STEPS} steps" in log(), "the closing lines"
    slurm.until("the end of all processes of jobs", lambda: slurm.processes() == [])

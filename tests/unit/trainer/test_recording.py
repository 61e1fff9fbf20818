"""Records of steps, read back from the disk."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_lora.checkpoint.state import Evaluation
from areal_lora.data.collate import collate
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.report import svg
from areal_lora.obs.report.summary import read_summary
from areal_lora.obs.trace import Spans
from areal_lora.rollout.channel.messages import EvalResult, EvalSample
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.learn import LearnReport
from areal_lora.trainer.recording import Recorder, evaluation_due
from areal_lora.types import AdapterRef, TrajectoryGroup
from tests.support.rollout.helpers import NAME, config, stream, trajectory
from tests.support.trainer.long_run import RESUMED


class Tenant:
    name, resumed = NAME, False

    def __init__(self) -> None:
        self.version, self.asked = 1, -1
        self.awaited = set[int]()
        self.evaluations = dict[int, Evaluation]()

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(name=self.name, version=self.version)


def test_rewards_are_averaged_over_samples_and_not_over_their_trajectories(tmp_path: Path) -> None:
    """An agent's sample of three conversations and reward 0 beside one of one conversation and reward 1."""
    prompt = stream().at(0)
    many = tuple(replace(trajectory(prompt, 0, reward=0.0), uid=f"a{i}", sample=0) for i in range(3))
    group = TrajectoryGroup(uid=prompt.uid, trajectories=(*many, trajectory(prompt, 0, index=1, reward=1.0)))
    tenant: Any = Tenant()
    recorder = Recorder(config("m"), RunFolder(tmp_path), object(), [tenant], time.monotonic())  # type: ignore[arg-type]
    report = LearnReport(sums=defaultdict(float, tokens=8.0), grad_norm=1.0, lr=1e-3, skipped=0.0)
    spans = Spans()
    phases = "wait_batch annotate train checkpoint_join checkpoint_copy publish_join publish_pack"
    spans.seconds.update(dict.fromkeys(phases.split(), 0.0))
    recorder.step(tenant, collate([group]), report, {0: 8}, spans)
    [step] = read_metrics(tmp_path).steps
    assert (step.reward_mean, step.reward_std, step.n_sequences) == (0.5, 0.5, 4)


@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_run_is_opened_resumed_and_finished_in_little_memory(tmp_path: Path, steps: int) -> None:
    command = [sys.executable, "-m", "tests.support.trainer.long_run", str(tmp_path), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    cost = json.loads(done.stdout)
    print(cost)
    assert cost["file_bytes"] > 1200 * steps
    assert cost["grown_bytes"] < 40 << 20
    assert cost["opened_s"] + cost["finished_s"] < 60.0
    kept = round(steps * RESUMED)
    assert cost["steps_done"] == kept
    summary = read_summary(tmp_path)
    assert (summary.steps, summary.publishes, summary.dropped) == (kept, kept, {"stale": (kept - 1) // 7})
    assert summary.staleness_histogram == {0: 300 * kept, 1: 700 * kept}
    assert (summary.eval_before, summary.eval_after) == (0.0, kept / steps)
    html = (tmp_path / "report.html").read_text()
    assert len(html) < 1 << 20
    # The one step of a large gradient norm is drawn at the top of its plot.
    [chart] = [part.split("</figure>")[0] for part in html.split("<figure>") if "Entropy and gradient norm" in part]
    norms = [float(point.split(",")[1]) for point in chart.split('points="')[2].split('"')[0].split()]
    assert min(norms) < svg.TOP + 30
    assert sum(norm < 150 for norm in norms) == 1


@pytest.mark.parametrize(
    ("version", "asked", "every_steps", "due"),
    [
        (0, -1, 20, True),
        (0, -1, 0, True),
        (1, 0, 20, False),
        (19, 0, 20, False),
        (20, 0, 20, True),
        (21, 20, 20, False),
        (23, 0, 20, True),  # 20 was passed over
        (40, 23, 20, True),
        (39, 23, 20, False),
        (7, -1, 0, False),
        (99, 0, 0, False),
        (100, 0, 0, True),
        (100, 100, 20, True),
        (97, 80, 20, False),
    ],
)
def test_when_an_evaluation_is_due(version: int, asked: int, every_steps: int, due: bool) -> None:
    assert evaluation_due(version, asked, every_steps=every_steps, last=100) is due


class Client:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def request_eval(self, ref: AdapterRef, tag: str) -> None:
        self.asked.append(ref.version)


def held_out(tenant: Tenant, **figures: Any) -> EvalResult:
    sample = EvalSample(
        uid="s0", prompt="1+1=", completion="?", answer="2", reward=None, correct=None, version=tenant.version
    )
    return EvalResult(
        adapter=NAME,
        version=min(tenant.awaited),
        tag="held-out",
        wall_s=1.0,
        samples=(sample,),
        **{"accuracy": 0.5, "reward_mean": 0.4, "n": 8, **figures},
    )


def test_one_evaluation_at_a_time_of_the_newest_version_and_the_last_one_always(tmp_path: Path) -> None:
    tenant: Any = Tenant()
    client, made = Client(), config("m", steps=30)
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"every_steps": 5})})
    recorder = Recorder(made, RunFolder(tmp_path), client, [tenant], time.monotonic())  # type: ignore[arg-type]
    for tenant.version in range(31):
        if tenant.version in (13, 29):  # slow: two more had become due meanwhile
            recorder._record_evals([held_out(tenant)])
        recorder.evaluate(tenant)
    assert client.asked == [0, 13, 29, 30]
    assert tenant.awaited == {29, 30}


def test_an_evaluation_is_recorded_with_all_that_it_could_not_judge(tmp_path: Path) -> None:
    tenant: Any = Tenant()
    recorder = Recorder(config("m"), RunFolder(tmp_path), Client(), [tenant], time.monotonic())  # type: ignore[arg-type]
    for figures in ({"accuracy": None, "unscored": 2, "left_out": 3, "left_out_first": ("s1", "s9")}, {}):
        tenant.version += 1
        tenant.awaited = {tenant.version}
        recorder._record_evals([held_out(tenant, **figures)])
    first, second = read_metrics(tmp_path).evals
    assert (first.accuracy, first.reward_mean, first.unscored, first.left_out) == (None, 0.4, 2, 3)
    assert first.figures() == (
        "mean reward 0.400 over 8 problems, 2 unscored, 3 left out (prompt too long: s1, s9, ...)"
    )
    assert second.figures() == "accuracy 0.500, mean reward 0.400 over 8 problems"
    assert first.samples[0].reward is None, "an example that could not be scored can be read back"
    assert tenant.evaluations == {
        2: Evaluation(accuracy=None, reward_mean=0.4),
        3: Evaluation(accuracy=0.5, reward_mean=0.4),
    }

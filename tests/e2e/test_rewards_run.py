"""A run with several rewards, one of them a judge: values, parts and costs reach the metrics and the report."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from areal_lora.library.runs import load_run
from tests.support.e2e.metrics import records
from tests.support.launcher.command import configs, embedded_run, forked_roles, forked_run
from tests.support.paths import ROOT
from tests.support.tasks.judge_stub import JudgeStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "a key of the test"
REWARDS = """
adapters:
  - reward:
      - kind: numeric_match
        workers: 1
      - kind: judge
        name: style
        weight: 0.5
        url: {url}
        model: stub
        key_env: TEST_JUDGE_KEY
        prompt: "Answer: {{completion}}. Grade from 0 to 10."
"""


def graded(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    """7 of 10 for every answer; the third request is throttled."""
    if number == 3:
        return 429, {"Retry-After": "0"}, {}
    message = {"role": "assistant", "content": "Score: 7"}
    return 200, {}, {"choices": [{"message": message}], "usage": {"prompt_tokens": 50, "completion_tokens": 3}}


def test_two_rewards_one_of_them_a_judge(tmp_path: Path) -> None:
    with JudgeStub(graded) as judge:
        (tmp_path / "rewards.yaml").write_text(REWARDS.format(url=judge.url))
        command = forked_run(
            tmp_path,
            *configs("rewards", folder=tmp_path),
            f"run.root={tmp_path}",
            "run.name=judged",
            "run.steps=2",
            "eval.every_steps=0",
            "adapters.gsm8k.sampling.prompts_per_step=8",
            "adapters.gsm8k.task.n_eval=8",
        )
        environment = os.environ | {"TEST_JUDGE_KEY": KEY}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "judged"
    steps = [record["metrics"] for record in records(folder) if record["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        assert step["reward/style"] == pytest.approx(0.7)
        assert step["train/reward_mean"] == pytest.approx(step["reward/numeric_match"] + 0.5 * 0.7)
    cost = "reward_cost/style"
    assert sum(step[f"{cost}/prompt_tokens"] for step in steps) == 50 * sum(
        step[f"{cost}/calls"] - step.get(f"{cost}/retries", 0) for step in steps
    )
    assert {f"Bearer {KEY}"} == set(judge.keys)
    written = [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert written == [], "the key is in no file"
    assert "style" in (folder / "report.html").read_text()


def test_a_reward_that_fails_on_every_answer_ends_the_run_once_and_with_its_line(tmp_path: Path) -> None:
    """It passes the check of gold answers, which have one token."""
    file = tmp_path / "rewards.py"
    file.write_text("def reward(completion, n_tokens):\n    return 1.0 if n_tokens == 1 else None.upper()\n")
    (tmp_path / "broken.yaml").write_text(f"adapters: [{{reward: {{kind: function, path: '{file}:reward'}}}}]\n")
    command = embedded_run(
        *configs("broken", folder=tmp_path),
        f"run.root={tmp_path}",
        "run.name=broken",
        "run.steps=2",
        "eval.every_steps=0",
        "adapters.gsm8k.sampling.prompts_per_step=8",
        "adapters.gsm8k.task.n_eval=8",
        *forked_roles(tmp_path, "trainer.python", "rollout.python"),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 64, done.stdout + done.stderr
    error = f"AttributeError: 'NoneType' object has no attribute 'upper' ({file}:2)"
    [line] = [line for line in done.stdout.splitlines() if "exited with code 64: " in line]
    assert line.startswith("trainer-"), "every rank ends alike"
    assert error in line
    assert "restarted in" not in done.stdout
    failure = load_run(tmp_path / "broken").failure
    assert failure is not None
    assert failure.code == 64
    assert error in failure.error
    log = (tmp_path / "broken" / "logs" / "controller-0.log").read_text()
    assert log.count("in reward") == 1, "one traceback"

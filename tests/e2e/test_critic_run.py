"""A short run of PPO with a critic, a reference that is renewed and two rewards; a trainer rank dies on the way.

One of the rewards is a judge: values, parts and costs reach the metrics and the report.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from areal_lora.checkpoint.recover import find
from areal_lora.checkpoint.state import files_of
from areal_lora.processes.watched import VARIABLE
from areal_lora.run_folder.paths import RunFolder
from tests.support.e2e.metrics import records
from tests.support.launcher.command import configs, forked_run
from tests.support.paths import ROOT
from tests.support.tasks.judge_stub import JudgeStub

STEPS = 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


KEY = "a key of the test"
REWARDS = """
adapters:
  - reward:
      - kind: numeric_match
      - kind: judge
        url: {url}
        model: stub
        key_env: TEST_JUDGE_KEY
        prompt: "Answer: {{completion}}. Grade from 0 to 10."
    reward_weights: [1, 0.5]
"""


def graded(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    """7 of 10 for every answer; the third request is throttled."""
    if number == 3:
        return 429, {"Retry-After": "0"}, {}
    message = {"role": "assistant", "content": "Score: 7"}
    return 200, {}, {"choices": [{"message": message}], "usage": {"prompt_tokens": 50, "completion_tokens": 3}}


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeStub]:
    with JudgeStub(graded) as stub:
        yield stub


@pytest.fixture(scope="module")
def folder(judge: JudgeStub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("critic run")
    (root / "rewards.yaml").write_text(REWARDS.format(url=judge.url))
    command = forked_run(
        root,
        *configs("ppo"),
        *configs("rewards", folder=root),
        f"run.root={root}",
        "run.name=ppo",
        f"run.steps={STEPS}",
        "eval.every_steps=0",
        "adapters.gsm8k.minibatches=2",
        "adapters.gsm8k.sampling.prompts_per_step=4",
        "adapters.gsm8k.task.n_eval=8",
        "adapters.gsm8k.algorithm.kl_coef=0.01",
        "adapters.gsm8k.algorithm.reference=initial",
        "adapters.gsm8k.algorithm.reference_refresh_steps=2",
    )
    environment = os.environ | {VARIABLE: f"once={root}:trainer.learned:2:kill", "TEST_JUDGE_KEY": KEY}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "ppo"


def steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["kind"] == "step"]


def test_every_step_trains_the_critic_also_after_the_resume(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]["trainer"]) == (STEPS, 1)
    for step in steps(folder):
        metrics = step["metrics"]
        assert metrics["train/value_loss"] > 0
        assert metrics.get("train/explained_variance", 0.0) <= 1
        assert metrics["extra/value_grad_norm"] > 0
        assert metrics["extra/value_skipped"] == 0
        assert metrics["train/kl"] is not None
    assert "value loss" in (folder / "report.html").read_text()


def test_the_checkpoint_holds_the_critic_and_the_export_does_not(folder: Path) -> None:
    newest = find(RunFolder(folder), "gsm8k").newest
    assert newest is not None
    manifest = newest.manifest
    assert manifest.version == STEPS
    critic = manifest.companions["critic"]
    assert (critic.step, manifest.clock.step) == (2 * STEPS, 2 * STEPS), "two minibatches a step"
    assert (critic.spec.rank, critic.spec.value_head) == (8, True)
    names = {name for entry in files_of(manifest, "critic") for name in tensors(newest.path / entry.name)}
    assert {"weight/value_head.weight", "exp_avg/value_head.bias"} < names
    assert files_of(manifest, "reference")
    [exported] = (folder / "adapters" / "gsm8k").glob("*.safetensors")
    assert [name for name in tensors(exported) if "value" in name and "v_proj" not in name] == []


def tensors(path: Path) -> list[str]:
    with safe_open(path, framework="np") as file:
        return list(file.keys())


def test_servers_get_the_policy_alone(folder: Path) -> None:
    published = [record for record in records(folder) if record["kind"] == "publish"]
    assert {record["adapter"] for record in published} == {"gsm8k"}
    assert {record["version"] for record in published} == set(range(STEPS + 1))


def test_rewards_have_values_parts_and_costs(folder: Path, judge: JudgeStub) -> None:
    """The judge's is 0.7 with weight 0.5."""
    made = [step["metrics"] for step in steps(folder)]
    for step in made:
        assert step["reward/judge"] == pytest.approx(0.7)
        assert step["train/reward_mean"] == pytest.approx(step["reward/numeric_match"] + 0.5 * 0.7)
    tokens, calls, retries = (  # a step whose answers were scored in the step before has none
        sum(step.get(f"reward_cost/judge/{name}", 0) for step in made) for name in ("prompt_tokens", "calls", "retries")
    )
    assert tokens == 50 * (calls - retries) > 0
    assert {f"Bearer {KEY}"} == set(judge.keys)
    written = [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert written == [], "the key is in no file"
    assert "judge" in (folder / "report.html").read_text()

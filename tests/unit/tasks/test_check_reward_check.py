"""Rewards are tried on gold answers before a run: in `train` and `plan` alike, in the run's own kind of process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.launch import main
from areal_lora.tasks.check import reward_problems, task_problems
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
REWARDS = """
def always(completion, answer):
    text = None
    return len(text)

def none(completion, answer):
    pass

def sometimes(completion, answer):
    return [1.0][len(completion) % 2]

def shaped(completions, answers):
    return [float(answer in completion) for completion, answer in zip(completions, answers)]

def asks(completion, answer, colour):
    return 1.0
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return file


def problems(*rewards: str, **cluster: str) -> list[str]:
    entries = [{"kind": "function", "path": path} for path in rewards]
    made = load_config([*FILES, {"cluster": cluster, "adapters": [{"reward": entries}]}])
    return [str(problem) for problem in reward_problems(made, online=False)]


def test_each_reward_that_fails_on_every_first_row_is_one_line(rewards: Path) -> None:
    always, asks = problems(*(f"{rewards}:{name}" for name in ("always", "none", "sometimes", "shaped", "asks")))
    assert always == (
        "adapters.0.reward.0.path: it fails on the gold answers of the first 4 rows of task.train: TypeError: "
        f"object of type 'NoneType' has no len() ({rewards}:4) (fix: correct the function, or the columns of the set)"
    )
    assert "adapters.0.reward.4.path" in asks
    assert "requires 'colour'" in asks


def test_none_for_every_first_row_is_refused_of_a_reward_alone(rewards: Path) -> None:
    """Beside others it may be the reward of rows that come later."""
    [none] = problems(f"{rewards}:none")
    assert f"the reward returned None, not a number ({rewards}:6)" in none
    assert problems(f"{rewards}:none", f"{rewards}:shaped") == []


def sets(folder: Path, reward: dict[str, Any], **columns: dict[str, Any]) -> dict[str, Any]:
    """Three sets of one row, to which ``columns`` add by the set's name."""
    for name in ("train", "eval", "hard"):
        row = {"prompt": "1+1?", "answer": "2", **columns.get(name, {})}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    paths = {name: str(folder / f"{name}.jsonl") for name in ("train", "eval")}
    hard = {"name": "hard", "task": {"kind": "dataset", "eval": str(folder / "hard.jsonl")}}
    return {"adapters": [{"task": {"kind": "dataset", **paths}, "reward": reward, "evals": [hard]}]}


RED = {"colour": "red"}
SETS = [({"train": RED, "eval": RED}, "evals.0.task"), ({"train": RED, "hard": RED}, "task.eval")]


@pytest.mark.parametrize(("columns", "wrong"), SETS)
def test_a_set_whose_answers_no_reward_can_score_is_named(
    rewards: Path, tmp_path: Path, columns: dict[str, Any], wrong: str
) -> None:
    reward = {"kind": "function", "path": f"{rewards}:asks"}
    (problem,) = reward_problems(load_config([*FILES, sets(tmp_path, reward, **columns)]), online=False)
    assert problem.path == "adapters.0.reward.path"
    assert f"the first 1 rows of {wrong}: " in problem.reason
    assert "requires 'colour'" in problem.reason
    every = sets(tmp_path, reward, train=RED, eval=RED, hard=RED)
    assert list(reward_problems(load_config([*FILES, every]), online=False)) == []


SERVED = [
    {"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "prompt": "{completion} {colour} {conversation}"},
    {"kind": "model", "url": "http://127.0.0.1:1/classify", "model": "m", "input": "{completion} {colour}"},
]


@pytest.mark.parametrize("reward", SERVED, ids=["judge", "model"])
def test_placeholders_of_served_rewards_are_columns_of_every_set(tmp_path: Path, reward: dict[str, Any]) -> None:
    config = load_config([*FILES, sets(tmp_path, reward, train=RED, eval=RED)])
    (problem,) = task_problems(config, online=False)
    assert problem.path == "adapters.0.reward"
    assert problem.reason.startswith("dataset/eval/0: the prompt names {colour}, the columns are: answer, completion")
    assert list(task_problems(config, online=False, resumed=True)) == [], "its rows stay"
    every = sets(tmp_path, reward, train=RED, eval=RED, hard=RED)
    assert list(task_problems(load_config([*FILES, every]), online=False)) == []


def test_it_works_in_a_notebook(rewards: Path) -> None:
    async def cell() -> list[str]:
        return problems(f"{rewards}:always")

    assert len(asyncio.run(cell())) == 1


def test_scorers_of_another_interpreter_are_not_judged_by_this_one(rewards: Path) -> None:
    assert problems(f"{rewards}:always", controller_python="/elsewhere/python") == []


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["plan", "train"])
def test_nothing_starts_with_a_broken_reward(
    rewards: Path, tmp_path: Path, dry: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("adapters: [{reward: {kind: function, path: 'rewards.py:always'}}]\n")
    words = [word for file in (*FILES, tmp_path / "mine.yaml") for word in ("--config", str(file))]
    assert main([*words, f"run.root={tmp_path}", "run.name=r", *dry]) == 64
    [error] = [line for line in capfd.readouterr().err.splitlines() if "scorer processes have fewer" not in line]
    assert error.startswith("error: adapters.0.reward.path: ")
    assert f"({rewards}:4)" in error
    assert not (tmp_path / "r").exists()

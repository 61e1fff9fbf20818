"""Rewards are tried on gold answers before a run: in `train` and `plan` alike, in the run's own kind of process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.launch import main
from areal_lora.tasks.check import reward_problems
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
        "adapters.0.reward.0.path: it fails on the gold answers of the first 4 rows: TypeError: object of type "
        f"'NoneType' has no len() ({rewards}:4) (fix: correct the function)"
    )
    assert "adapters.0.reward.4.path" in asks
    assert "requires 'colour'" in asks


def test_none_for_every_first_row_is_refused_of_a_reward_alone(rewards: Path) -> None:
    """Beside others it may be the reward of rows that come later."""
    [none] = problems(f"{rewards}:none")
    assert f"the reward returned None, not a number ({rewards}:6)" in none
    assert problems(f"{rewards}:none", f"{rewards}:shaped") == []


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

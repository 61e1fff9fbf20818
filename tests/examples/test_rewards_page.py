"""The configurations of docs/en/tasks.md, section Rewards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError
from areal_lora.tasks.check import task_problems
from tests.support.docs import section
from tests.support.paths import EXAMPLES, ROOT

BASE = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
TEXT = section(ROOT / "docs" / "en" / "tasks.md", "Rewards")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]


def load(number: int, folder: Path) -> Config:
    (folder / "rewards.py").write_text("def reward(completion, answer):\n    return 1.0\n")
    (folder / "own.yaml").write_text(yaml.safe_dump(BLOCKS[number]))
    return load_config([*BASE, folder / "own.yaml"])


def test_the_rewards_of_the_page(tmp_path: Path) -> None:
    kinds = [[reward.kind for reward in load(i, tmp_path).adapters[0].rewards] for i in range(len(BLOCKS))]
    assert kinds == [["function"], ["numeric_match", "function"], ["judge"], ["model"], ["code"], ["function"]]


def test_the_tests_of_the_code_reward_are_in_its_row(tmp_path: Path) -> None:
    [row] = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "rows.jsonl").write_text(row)
    overlay = BLOCKS[4]
    columns = {"prompt": "prompt", "answer": None}
    overlay["adapters"][0]["task"] = {
        "kind": "dataset",
        "train": "rows.jsonl",
        "eval": "rows.jsonl",
        "columns": columns,
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(overlay))
    assert list(task_problems(load_config([*BASE, tmp_path / "own.yaml"]), online=False)) == []
    (tmp_path / "rows.jsonl").write_text(json.dumps(json.loads(row) | {"stdout": ["3"]}))
    [problem] = task_problems(load_config([*BASE, tmp_path / "own.yaml"]), online=False)
    assert str(problem).startswith("adapters.0.reward: ")
    assert "2 inputs in 'stdin', 1 outputs in 'stdout'" in str(problem)


def test_errors_name_the_key_in_either_spelling(tmp_path: Path) -> None:
    overlay = BLOCKS[1]
    overlay["adapters"][0]["reward"][1]["timeout"] = 2
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(overlay))
    with pytest.raises(ConfigError, match=r"adapters\.0\.reward\.1\.timeout.*use adapters\.0\.reward\.1\.timeout_s"):
        load_config([*BASE, tmp_path / "own.yaml"])
    overlay["adapters"][0]["reward"] = {"kind": "function", "path": "a.py:b", "timeout_s": "much"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(overlay))
    with pytest.raises(ConfigError, match=r"adapters\.0\.reward\.timeout_s: 'much'"):
        load_config([*BASE, tmp_path / "own.yaml"])

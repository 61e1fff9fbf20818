"""The configurations of docs/en/tasks.md, section Tasks, with data as it describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from areal_lora.config.load import load_config
from areal_lora.tasks.datasets import load_samples
from tests.support.docs import section
from tests.support.paths import EXAMPLES, ROOT

BASE = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
ROWS = [{"problem": f"{i}+1?", "solution": i + 1, "level": 1, "subject": "algebra"} for i in range(4)]


@pytest.fixture
def blocks(tmp_path: Path) -> list[dict[str, Any]]:
    """The YAML blocks: the task, two formats, evaluation sets; data files lie where the first names them."""
    data = tmp_path / "data"
    data.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), data / "train.parquet")
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = section(ROOT / "docs" / "en" / "tasks.md", "Tasks")
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def task_of(blocks: list[dict[str, Any]], folder: Path, number: int) -> Any:
    overlay = blocks[0]
    overlay["adapters"][0]["task"] |= blocks[number] if number else {}
    (folder / "own.yaml").write_text(yaml.safe_dump(overlay))
    return load_config([*BASE, folder / "own.yaml"]).adapters[0].task


def test_there_are_a_task_two_formats_and_sets(blocks: list[dict[str, Any]]) -> None:
    assert [list(block) for block in blocks] == [["adapters"], ["format"], ["format"], ["evals"]]


def test_the_task_reads_its_files(blocks: list[dict[str, Any]], tmp_path: Path) -> None:
    task = task_of(blocks, tmp_path, 0)
    assert [s.answer for s in load_samples(task, "train")] == [1, 2, 3, 4]
    assert [s.prompt for s in load_samples(task, "eval")] == [row["problem"] for row in ROWS]


def test_the_template(blocks: list[dict[str, Any]], tmp_path: Path) -> None:
    [first, *_] = load_samples(task_of(blocks, tmp_path, 1), "train")
    assert first.prompt == "Problem (1): 0+1?\nSolution:"


def test_the_chat(blocks: list[dict[str, Any]], tmp_path: Path) -> None:
    task = task_of(blocks, tmp_path, 2)
    assert task.format.is_chat
    assert (task.format.prefill, task.format.chat_template_kwargs) == ("<answer>", {"enable_thinking": False})
    [first, *_] = load_samples(task, "train")
    assert first.messages == (
        {"role": "system", "content": "Think step by step."},
        {"role": "user", "content": "0+1? End with the number alone."},
    )

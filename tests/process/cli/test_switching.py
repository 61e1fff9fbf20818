"""your_own_task.md, Coming from another system: its keys exist, and its files train what verl's data describe."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from areal_lora.config.load import load_config
from areal_lora.config.sections.task import FunctionReward
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.scorer import ScorerPool
from tests.support.cli.command import forked_python
from tests.support.docs import blocks, section
from tests.support.paths import EXAMPLES, ROOT

PAGE = ROOT / "docs" / "en" / "your_own_task.md"
TITLE = "Coming from another system"
FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
COMPUTE_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] >= 0
    return float(solution_str.rpartition("####")[2].strip() == ground_truth)
"""
COMPUTE_DICT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    pred = solution_str.rpartition("####")[2].strip()
    return {"score": 1.0 if pred == ground_truth else -1.0, "acc": pred == ground_truth, "pred": pred, "index": 7}
"""


def verl_rows(split: str, n: int) -> list[dict[str, object]]:
    """Rows as verl's `examples/data_preprocess/gsm8k.py` writes them."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} plus 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": split, "index": i},
        }
        for i in range(n)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl_rows(split, 80)), tmp_path / f"{split}.parquet")
    (tmp_path / "compute_score.py").write_text(COMPUTE_SCORE)
    for block in blocks(PAGE, TITLE):
        (tmp_path / block.text.partition("\n")[0].removeprefix("# ")).write_text(block.text)
    return tmp_path


def test_keys_of_the_table_exist() -> None:
    """The first column names keys of the schema."""
    table = section(PAGE, TITLE).partition("What differs:")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [part.partition(":")[0] for cell in cells for part in cell.split("`")[1::2]]
    keys = [name for name in names if "." in name]
    assert len(keys) > 25
    schema = json.loads((ROOT / "examples" / "schema.json").read_text())
    for key in keys:
        node = schema
        for part in key.replace("[]", ".[]").split("."):
            while "$ref" in node or "allOf" in node:
                ref = node["$ref"] if "$ref" in node else node["allOf"][0]["$ref"]
                node = schema["$defs"][ref.rpartition("/")[2]]
            assert part == "[]" or part in node["properties"], f"{key}: no {part}"
            node = node["items"] if part == "[]" else node["properties"][part]


@pytest.mark.slow
def test_data_and_rewards_of_verl(folder: Path) -> None:
    command = [
        forked_python(),
        "-m",
        "areal_lora.launch",
        *(word for path in FILES for word in ("--config", str(path))),
    ]
    command += ["--config", "task.yaml", "--dry-run", f"model.path={ROOT / 'examples/math/tiny_model'}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    config = load_config([*FILES, folder / "task.yaml"], [])
    task, reward = config.adapters[0].task, config.adapters[0].reward
    assert isinstance(reward, FunctionReward)
    sample = load_samples(task.model_copy(update={"train": str(folder / "train.parquet")}), "train")[7]
    assert (sample.messages, sample.answer) == (({"role": "user", "content": "What is 7 plus 1?"},), "8")

    given = [ScoreItem(completion=f"#### {n}", answer=sample.answer, columns=dict(sample.columns)) for n in (8, 9)]

    async def scored() -> list[Score]:
        path = f"{folder / 'compute_score.py'}:compute_score"
        async with ScorerPool(reward.model_copy(update={"path": path})) as pool:
            scores = await pool.score(given)
        assert [score.detail for score in scores] == ["", ""], scores
        return scores

    assert [score.reward for score in asyncio.run(scored())] == [1.0, 0.0]
    (folder / "compute_score.py").write_text(COMPUTE_DICT)
    both = asyncio.run(scored())
    assert [(score.reward, score.correct) for score in both] == [(1.0, True), (-1.0, False)]

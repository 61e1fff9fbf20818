"""Answers of a data set that are trained on, and the check of all rows before a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.errors import ConfigError
from areal_lora.tasks.check import task_problems
from areal_lora.tasks.datasets import given_answer
from areal_lora.types import Sample
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


def test_the_gold_answer_or_a_column() -> None:
    sample = Sample(uid="s", prompt="p", answer="4", columns={"answer": "4", "worked": "2+2=4", "n": 3})
    assert given_answer(sample, None) == "4"
    assert given_answer(sample, "worked") == "2+2=4"
    for column in ("n", "wrked"):
        with pytest.raises(ConfigError, match="answer, worked, n"):
            given_answer(sample, column)
    nested = Sample(uid="s", prompt="p", answer="4", columns={"extra_info": {"worked": "2+2=4"}})
    assert given_answer(nested, "extra_info.worked") == "2+2=4"


def test_all_rows_are_checked_before_a_start(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1), "worked": "" if n == 5 else "so"} for n in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"adapters.0.{key}" for key in ("task.kind=dataset", f"task.train={data}", "sft.column=worked")]
    assert list(task_problems(load_config(FILES, keys), online=False)) == [], "only where they are trained on"
    (problem,) = task_problems(load_config(FILES, [*keys, "adapters.0.sft.steps=3"]), online=False)
    assert (problem.path, "worked" in problem.reason) == ("adapters.0.sft.column", True)


def test_gold_answers_that_state_no_number_are_refused_where_numbers_are_compared(tmp_path: Path) -> None:
    """Sampling them is lost: each answer to them is an error, three times."""
    rows = [{"prompt": f"{n}+1?", "answer": "B" if n in (5, 6) else str(n + 1)} for n in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"adapters.0.{key}" for key in ("task.kind=dataset", f"task.train={data}", f"task.eval={data}")]
    (problem,) = task_problems(load_config(FILES, keys), online=False)
    assert problem.path == "adapters.0.reward.kind"
    assert problem.reason == "4 of 40 gold answers state no number, the first is 'B'"
    assert "math_verify" in problem.fix
    assert not list(task_problems(load_config(FILES, keys), online=False, resumed=True)), "its rows stay"
    for reward in ("math_verify", "none"):
        assert not list(task_problems(load_config(FILES, [*keys, f"adapters.0.reward.kind={reward}"]), online=False))

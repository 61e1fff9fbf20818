"""The sequences of the truth check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.data.collate import scoring_batch
from areal_lora.data.prompts import load_tokenizer
from areal_lora.trainer.adapter import probe_rows
from tests.support.paths import EXAMPLES

KEYS = "adapters.gsm8k.task"
SYSTEM_ONLY = {"messages": [{"role": "system", "content": "Play."}]}
CHAT = [f"{KEYS}.columns.messages=messages", f"{KEYS}.format.kind=chat"]


def rows_of(folder: Path, problems: list[dict[str, Any]], overrides: list[str]) -> list[list[int]]:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, problems)))
    task = [f"{KEYS}.kind=dataset", f"{KEYS}.train={path}", f"{KEYS}.eval={path}", f"{KEYS}.columns.answer=null"]
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    config = load_config(files, [*task, *overrides])
    return probe_rows(config, config.adapters[0], load_tokenizer(str(EXAMPLES / "tiny_model")))


@pytest.mark.parametrize(("problem", "overrides"), [({"prompt": "7"}, []), (SYSTEM_ONLY, CHAT)])
def test_problems_without_text_give_tokens_to_score(
    tmp_path: Path, problem: dict[str, Any], overrides: list[str]
) -> None:
    """An environment writes the text: a row is a number, or a system prompt alone."""
    rows = rows_of(tmp_path, [problem] * 4, overrides)
    assert len({tuple(row) for row in rows}) == len(rows) == 4
    assert int(scoring_batch(rows, "a").loss_mask.sum()) == sum(len(row) - 1 for row in rows) > 4
    assert rows == rows_of(tmp_path, [problem] * 4, overrides), "every start has the same"


def test_problems_with_text_are_scored(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(EXAMPLES / "tiny_model"))
    rows = rows_of(tmp_path, [{"prompt": "What is 2 + 3?"}, {"prompt": "7"}], [])
    assert tokenizer.decode(rows[0], skip_special_tokens=True) == "What is 2 + 3?"
    assert len(rows) == 2


def test_problems_that_start_alike_share_no_hidden_state(tmp_path: Path) -> None:
    """Of a common start, a tie between experts would change all sequences; one is allowed (`probe.TIES`)."""
    problems = [f"Q: {name} has {n} coins. A: {n}" for name, n in (("Tom", 3), ("Lea", 4), ("Tom", 5), ("Tom", 5))]
    tokenizer = load_tokenizer(str(EXAMPLES / "tiny_model"))
    rows = rows_of(tmp_path, [{"prompt": problem} for problem in problems], [])
    assert len({row[0] for row in rows}) == len(rows) == 4
    for row, problem in zip(rows, problems, strict=True):
        assert tokenizer.decode(row, skip_special_tokens=True).strip() in problem
    assert all(len(row) > 10 for row in rows)

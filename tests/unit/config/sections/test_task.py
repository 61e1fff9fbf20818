"""Presets and formats of tasks, and the tasks of evaluation sets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from areal_lora.config.sections.task import DatasetTask, EvalSetConfig, PromptFormat


def test_gsm8k_is_a_preset_of_a_data_set_and_a_key_beside_it_overrides_it() -> None:
    task = DatasetTask(kind="gsm8k", n_eval=8)  # type: ignore[call-arg]
    assert (task.train, task.subset, task.columns.prompt, task.n_eval) == ("openai/gsm8k", "main", "question", 8)
    assert task.format.template == "Question: {question}\nAnswer:"
    assert DatasetTask.model_validate(task.model_dump()) == task, "as a run folder records it"


@pytest.mark.parametrize(
    "key", [{"system_prompt": "Be brief."}, {"chat_template_kwargs": {"thinking": False}}, {"prefill": "It is"}]
)
def test_keys_of_a_chat_need_a_chat(key: dict[str, Any]) -> None:
    assert PromptFormat(kind="chat", **key).is_chat
    assert PromptFormat(kind="chat_append", **key).is_chat
    with pytest.raises(ValidationError, match=f"kind template has no {next(iter(key))}: set kind=chat"):
        PromptFormat(**key)


def test_an_evaluation_set_reads_held_out_rows_only() -> None:
    task = EvalSetConfig.model_validate({"name": "x", "task": {"kind": "dataset", "eval": "rows.jsonl"}}).task
    assert isinstance(task, DatasetTask)
    assert (task.train, task.eval) == ("", "rows.jsonl")
    with pytest.raises(ValidationError, match=r"held-out rows only: add task\.eval"):
        EvalSetConfig.model_validate({"name": "x", "task": {"kind": "dataset", "train": "rows.jsonl"}})

"""Given answers of rows: texts and conversations, and which rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from areal_lora.config.load import load_config
from areal_lora.config.sections.task import DatasetTask
from areal_lora.errors import ConfigError
from areal_lora.tasks.check import task_problems
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.stored_samples import given_answer
from areal_lora.types import Sample
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
TURNS = [
    {"role": "user", "content": "3+?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def test_the_gold_answer_or_a_column() -> None:
    sample = Sample(uid="s", prompt="p", answer="4", columns={"answer": "4", "worked": "2+2=4", "n": 3})
    assert given_answer(sample, None) == said("4")
    assert given_answer(sample, "worked") == said("2+2=4")
    for column in ("n", "wrked"):
        with pytest.raises(ConfigError, match="answer, worked, n"):
            given_answer(sample, column)
    nested = Sample(uid="s", prompt="p", answer="4", columns={"extra_info": {"worked": "2+2=4"}})
    assert given_answer(nested, "extra_info.worked") == said("2+2=4")


def dataset(path: Path, rows: list[dict[str, Any]], **columns: str | None) -> DatasetTask:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetTask.model_validate(
        {"train": str(path), "eval": str(path), "columns": {"answer": None, **columns}, "format": {"kind": "chat"}}
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_of_a_whole_conversation_is_a_prompt_and_what_follows(tmp_path: Path, suffix: str) -> None:
    """Arrow writes null for each key that a message lacks, which templates may take for a key that is there."""
    (sample,) = load_samples(dataset(tmp_path / f"a.{suffix}", [{"messages": TURNS}], messages="messages"), "train")
    assert (sample.prompt, sample.messages) == ("3+?", (TURNS[0],))
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]
    want = [{"role": "assistant", "content": "", "tool_calls": calls}, TURNS[2], TURNS[3]]
    assert given_answer(sample, "messages") == want
    row = {"prompt": "3+?", "after": TURNS[1:]}
    (sample,) = load_samples(dataset(tmp_path / f"b.{suffix}", [row]), "train")
    assert given_answer(sample, "after") == want, "a continuation of the prompt"


def test_a_systems_message_of_the_format_is_before_a_whole_conversation(tmp_path: Path) -> None:
    task = dataset(tmp_path / "a.jsonl", [{"messages": TURNS}], messages="messages")
    how = task.format.model_copy(update={"system_prompt": "Add."})
    (sample,) = load_samples(task.model_copy(update={"format": how}), "train")
    assert sample.messages == ({"role": "system", "content": "Add."}, TURNS[0])
    assert len(given_answer(sample, "messages")) == 3


def test_prompts_have_calls_in_either_form_and_messages_without_a_text(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": None},
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": '{"a": 3}'}]},
        {"role": "user", "content": "and?"},
    ]
    task = dataset(tmp_path / "a.jsonl", [{"turns": turns, "answer": "3"}], messages="turns")
    (sample,) = load_samples(task, "train")
    assert sample.messages is not None
    assert sample.messages[0] == {"role": "system", "content": ""}
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 3}}]}
    assert sample.messages[2:] == (called, turns[3])


def test_arguments_that_no_reward_could_get_stay_text() -> None:
    for spelt in ('{"a": NaN}', "no JSON", f'{{"a": {2**64}}}', "[" * 10**5):
        call = {"function": {"name": "add", "arguments": spelt}}
        turns = [{"role": "assistant", "tool_calls": [call]}]
        sample = Sample(uid="s", prompt="p", answer=None, messages=(TURNS[0],), columns={"after": turns})
        assert given_answer(sample, "after")[0]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([{"role": "assistant"}], "message 0 lacks role or content"),
        ([*TURNS[1:3], {"role": "assistant", "content": None}], "message 2 lacks role or content"),
        ([{"content": "7"}], "message 0 lacks role or content"),
        ([*said("6"), *said("7")], "two messages of the assistant's in a row, from message 0"),
        ([*said("6"), TURNS[0]], "does not end with an answer of the assistant's"),
        ([TURNS[0]], "does not end with an answer of the assistant's"),
        ([{"role": "user", "content": "4+?"}, *said("7")], "starts with other messages than the prompt"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "message 0: content: part 0 is of type image"),
        ([{"role": "assistant", "tool_calls": ["add"]}], "message 0: tool_calls are no calls"),
        (["7"], "holds no list of messages"),
        ([], "holds no list of messages"),
    ],
)
def test_what_is_no_answer_is_one_line_with_its_row(turns: list[Any], words: str) -> None:
    sample = Sample(uid="dataset/train/3", prompt="3+?", answer=None, messages=(TURNS[0],), columns={"after": turns})
    with pytest.raises(ConfigError, match=f"^sft.column: dataset/train/3: column 'after'.*{words}.*fix: ") as caught:
        given_answer(sample, "after")
    assert "\n" not in str(caught.value)


def test_messages_need_a_chat() -> None:
    sample = Sample(uid="s", prompt="3+?", answer=None, columns={"after": said("7")})
    with pytest.raises(ConfigError, match=r"task\.format\.kind=chat"):
        given_answer(sample, "after")


def test_rows_that_end_with_the_assistants_are_for_given_answers_only(tmp_path: Path) -> None:
    task = dataset(tmp_path / "rows.jsonl", [{"messages": TURNS}] * 3, messages="messages")
    keys = ["task.kind=dataset", f"task.train={task.train}", f"task.eval={task.train}", "task.format.kind=chat"]
    keys += ["task.columns={messages: messages, answer: null}", "reward.kind=none"]
    keys = [f"adapters.0.{key}" for key in keys]
    (problem,) = task_problems(load_config(FILES, keys), online=False)
    assert problem.path == "adapters.0.task.columns.messages"
    assert problem.reason.endswith("the last message is the assistant's, so there is nothing to answer")
    chosen = [*keys, "adapters.0.sft.steps=3", "adapters.0.sft.column=messages"]
    assert not list(task_problems(load_config(FILES, chosen), online=False))

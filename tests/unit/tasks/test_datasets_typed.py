"""What a person types becomes the prompt that the task would write."""

from __future__ import annotations

import pytest

from areal_lora.config.sections.task import Columns, DatasetTask, PromptFormat, WordProblemsTask
from areal_lora.errors import ConfigError
from areal_lora.tasks.datasets import typed_sample
from areal_lora.tasks.word_problems import draw_problem


def test_each_task_writes_its_own_prompt() -> None:
    problem = draw_problem(0, "train", 0).prompt
    assert typed_sample(WordProblemsTask(), problem.removeprefix("Q: ").removesuffix("\nA:")).prompt == problem
    assert typed_sample(WordProblemsTask(), problem).prompt == problem
    assert typed_sample(DatasetTask(kind="gsm8k"), "1 + 1?").prompt == "Question: 1 + 1?\nAnswer:"
    task = DatasetTask(train="x.jsonl", columns=Columns(prompt="problem"), format=PromptFormat(template="<{problem}>"))
    assert typed_sample(task, "say {x}").prompt == "<say {x}>"
    nested = DatasetTask(
        train="x.jsonl", columns=Columns(prompt="a.b"), format=PromptFormat(template="{a.b}! {prompt}")
    )
    assert typed_sample(nested, "go").prompt == "go! go"
    blank = DatasetTask(
        train="x.jsonl", columns=Columns(prompt="the text"), format=PromptFormat(template="<{the text}>")
    )
    assert typed_sample(blank, "go").prompt == "<go>"


def test_a_chat_has_its_system_prompt_and_the_turns_before() -> None:
    task = DatasetTask(
        train="x.jsonl", format=PromptFormat(kind="chat", system_prompt="Be brief.", template="Now: {prompt}")
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages = typed_sample(task, "c", turns).messages
    assert messages is not None
    assert [m["content"] for m in messages] == ["Be brief.", "a", "b", "Now: c"]


def test_a_template_of_other_columns_is_refused() -> None:
    task = DatasetTask(train="x.jsonl", format=PromptFormat(template="{title}: {body}"))
    with pytest.raises(ConfigError, match="column 'title'"):
        typed_sample(task, "x")

"""Rewards of TRL take texts, or the messages of a chat, by their annotation; those of verl have their own names."""

from __future__ import annotations

import re
from typing import Any, Dict, List  # noqa: UP035

import pytest

from areal_lora.tasks.reward_calls import RewardCall, ScoreItem
from areal_lora.types import Sample


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    """As in `trl.rewards.format_rewards`."""
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


ANSWERS = ["<think>a</think> 4", "4"]
ITEMS = [ScoreItem.of(Sample(uid=text, prompt="2+2", answer="4"), text, prefill="So: ") for text in ANSWERS]
MESSAGES = [[{"role": "assistant", "content": text}] for text in ANSWERS]


def test_a_reward_of_trl_for_chats_works_unchanged() -> None:
    assert RewardCall.of(think_format_reward, "r").many(ITEMS) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("annotation", "given"),
    [
        (list[list[dict[str, str]]], MESSAGES),
        (List[List[Dict[str, Any]]], MESSAGES),  # noqa: UP006
        ("list[ list[dict] ]", MESSAGES),
        (list[str], ANSWERS),
        ("list[str] | list[list[dict]]", ANSWERS),
        (list, ANSWERS),
        (None, ANSWERS),
    ],
)
def test_completions_are_messages_where_they_are_annotated_so(annotation: object, given: list[object]) -> None:
    def reward(completions, answers):
        return list(zip(completions, answers, strict=True))

    if annotation is not None:
        reward.__annotations__["completions"] = annotation
    assert RewardCall.of(reward, "r").many(ITEMS) == [(each, "4") for each in given]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """As in `verl.utils.reward_score`."""
    return data_source, solution_str, ground_truth, extra_info


ROW = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 3}}


@pytest.mark.parametrize("missing", ["", "extra_info"])
def test_a_reward_of_verl_works_unchanged(missing: str) -> None:
    row = {name: value for name, value in ROW.items() if name != missing}
    item = ScoreItem(completion="#### 4", answer="4", columns=row)
    assert RewardCall.of(compute_score, "r").one(item) == ("gsm8k", "#### 4", "4", row.get("extra_info"))


def test_a_row_without_a_field_of_verl_is_no_completion() -> None:
    with pytest.raises(TypeError, match="the reward requires 'data_source', the data set's columns are: none"):
        RewardCall.of(compute_score, "r").one(ScoreItem(completion="#### 4", answer="4"))


def test_a_column_comes_before_another_name_of_the_answer() -> None:
    item = ScoreItem(completion="a", answer="gold", columns={"ground_truth": "of the row", "solution_str": "worked"})
    assert RewardCall.of(lambda text, solution_str, ground_truth: (text, solution_str, ground_truth), "r").one(
        item
    ) == ("a", "worked", "of the row")
    plain = ScoreItem(completion="a", answer="gold")
    assert RewardCall.of(lambda text, ground_truth: (text, ground_truth), "r").one(plain) == ("a", "gold")
    batch = RewardCall.of(lambda completions, ground_truth: list(zip(completions, ground_truth, strict=True)), "r")
    assert batch.many([plain]) == [("a", "gold")]

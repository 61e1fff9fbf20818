"""Rewards of TRL take texts, or the messages of a chat, by their annotation."""

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

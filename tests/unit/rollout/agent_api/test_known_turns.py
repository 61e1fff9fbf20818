"""The work of a turn does not grow with the conversation before it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from areal_lora.data.prompts import Formatter
from areal_lora.rollout import agent_api
from areal_lora.rollout.agents import AgentTask
from tests.support.rollout.agent_endpoint import TOOL, ToolTokenizer, asked, episode, saying

TURNS = 12


class Counting(ToolTokenizer):
    """Counts texts that the template writes, and letters that are tokenized."""

    rendered = encoded = 0

    def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
        self.rendered += 1
        return super().apply_chat_template(*arguments, **options)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_request_is_written_once_and_only_new_messages_are_tokenized(tools: list[Any]) -> None:
    async def agent(task: AgentTask) -> float:
        messages: list[Any] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": "hi"})
            status, body = await asked(task, messages=messages, **({"tools": tools} if tools else {}))
            assert status == 200
            messages.append(body["choices"][0]["message"])
        return 1.0

    tokenizer = Counting()
    made = episode(agent, saying(["hey"] * TURNS), formatter=Formatter(tokenizer=tokenizer))
    (trajectory,) = made.group.trajectories
    assert tokenizer.rendered == TURNS + len(tools), "once more for the first request with tools"
    assert tokenizer.encoded == trajectory.loss_mask.count(0)


def test_the_collector_visits_no_more_objects_in_a_longer_conversation() -> None:
    """It stops the event loop: 2,000 conversations of 100 turns took 0.6 s."""
    visited = list[int]()

    async def agent(task: AgentTask) -> float:
        messages: list[Any] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": "hi"})
            _, body = await asked(task, messages=messages)
            messages.append(body["choices"][0]["message"])
            if turn in (0, TURNS - 1):
                gc.collect()
                ours = [each for each in gc.get_objects() if str(type(each).__module__).startswith(agent_api.__name__)]
                visited.append(len(ours))
        return 1.0

    episode(agent, saying(["hey"] * TURNS), formatter=Formatter(tokenizer=ToolTokenizer()))
    first, last = visited
    assert last < first + TURNS

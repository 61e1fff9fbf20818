"""One run of an agent against the real endpoint, with a server behind it that samples what the test says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from areal_lora.data.prompts import Formatter
from areal_lora.rollout.agent_api.endpoint import agent_gateway
from areal_lora.rollout.agents import AgentResult, AgentTask, AgentWorkflow
from areal_lora.rollout.conversations import ConversationFile
from areal_lora.rollout.workflow import Episode, WorkflowContext
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import EOS, MAX_MODEL_LEN, SAMPLING, V1, CharTokenizer, Graded, prompt_of, served

FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES = [{"role": "user", "content": "hi"}]


class ToolTokenizer(CharTokenizer):
    """Writes tools as ``[names]``, and calls as ``{name arguments}`` with arguments spelt by `json.dumps`."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        text = "".join(f"[{tool['function']['name']}]" for tool in kwargs.get("tools", ()))
        for message in conversation:
            calls = (call["function"] for call in message.get("tool_calls", ()))
            spelt = "".join(f"{{{call['name']} {json.dumps(call['arguments'])}}}" for call in calls)
            if message["role"] == "assistant":
                text += f"{message['content']}{spelt}\2"
            else:
                name = f"({message['name']})" if "name" in message else ""
                text += f"<{message['role']}{name}:{message['content']}>"
        return text


def find_calls(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The parser of ``ToolTokenizer``'s format."""
    return [
        {
            "content": text.partition("{")[0],
            "calls": [{"name": n, "arguments": a} for n, a in re.findall(r"\{(\w+) (\{.*?\})\}", text)],
        }
        for text in body["texts"]
    ]


def saying(texts: Sequence[str]) -> FakeServer:
    """A server that says these texts in turn, each with the end of sequence."""
    left = iter(texts)

    def answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
        text = next(left)
        return [*map(ord, text), EOS], text

    return FakeServer(models={str(V1)}, answer=answer, parse=find_calls)


def rewarded(agent: Callable[[AgentTask], Any]) -> Callable[[AgentTask], Coroutine[Any, Any, AgentResult]]:
    """Plays ``agent``, which returns its reward, as a worker does."""

    async def play(task: AgentTask) -> AgentResult:
        played = await agent(task)
        return played if isinstance(played, AgentResult) else AgentResult(reward=played)

    return play


def episode(
    agent: Callable[[AgentTask], Any],
    server: FakeServer,
    *,
    parser: str | None = "any",
    formatter: Formatter | None = None,
    max_model_len: int = 32 * MAX_MODEL_LEN,
    kept: ConversationFile | None = None,
    scorer: Graded | None = None,
    n_samples: int = 1,
    folder: str | None = None,
) -> Episode:
    """Raises what the agent raises as a fault of the group."""

    async def main() -> Episode:
        sampling = SAMPLING.model_copy(update={"n_samples": n_samples, "timeout_s": 120.0})
        async with served(server, scorer or Graded(), sampling) as context, agent_gateway() as sessions:
            context: WorkflowContext = replace(
                context, formatter=formatter or Formatter(tokenizer=ToolTokenizer()), max_model_len=max_model_len
            )
            workflow = AgentWorkflow(
                context=context, sessions=sessions, agent=rewarded(agent), tool_parser=parser, kept=kept
            )
            return await workflow.run(prompt_of("1+1="), V1, seed=7)

    return asyncio.run(main())


async def asked(task: AgentTask, path: str = "/chat/completions", **body: Any) -> tuple[int, Any]:
    """Status and decoded body of a request as it goes over the wire."""
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(task.base_url + path, json={"model": task.model} | body, headers=headers) as response,
    ):
        return response.status, await response.json()

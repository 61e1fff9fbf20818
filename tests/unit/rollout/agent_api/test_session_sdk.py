"""The OpenAI Agents SDK in a conversation of three answers and three calls, read by vLLM's hermes parser.

A fake server says what a model that can call tools would say. The oracle is `apply_chat_template` of the tokenizer with
the conversation as a user of OpenAI's API would write it down.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pydantic
import pytest
from transformers import AutoTokenizer

from areal_lora.data.prompts import Formatter
from areal_lora.network.http_server import ToolCallsBody
from areal_lora.rollout.agents import AgentTask
from areal_lora.rollout.conversations import ConversationFile, read_conversations
from areal_lora.run_folder.paths import RunFolder
from tests.support.lazy import Lazy
from tests.support.paths import EXAMPLES
from tests.support.rollout.agent_endpoint import MESSAGES, TOOL, ToolTokenizer, episode, saying
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import V1

tool_calls = Lazy("areal_lora.engine.vllm_ext.server.tool_calls")
agents = Lazy("agents")
openai = Lazy("openai")

TEMPLATE = """\
{%- if tools %}Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<assistant>{{ message.content }}
{%- for call in message.tool_calls or () %}{{ '' if loop.first else '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ eos_token }}
{% else %}<{{ message.role }}>{{ message.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
SAID: list[tuple[str, list[tuple[str, dict[str, int]]]]] = [
    ("First both products.", [("multiply", {"a": 3, "b": 4}), ("multiply", {"a": 5, "b": 6})]),
    ("", [("add", {"a": 12, "b": 30})]),
    ("It is 42.", []),
]
RESULTS = [["12", "30"], ["42"]]


def multiply(a: int, b: int) -> str:
    """The product."""
    return str(a * b)


def add(a: int, b: int) -> str:
    """The sum."""
    return str(a + b)


def spelt(content: str, calls: list[tuple[str, dict[str, int]]], separators: tuple[str, str]) -> str:
    parts = [content] if content else []
    for name, arguments in calls:
        body = json.dumps({"name": name, "arguments": arguments}, separators=separators)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def answers(separators: tuple[str, str]) -> list[str]:
    return [spelt(content, calls, separators) for content, calls in SAID]


def written(turns: int) -> list[dict[str, Any]]:
    """The conversation up to so many answers, in the format of chat templates."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Calculate."},
        {"role": "user", "content": "3*4+5*6?"},
    ]
    for (content, calls), results in zip(SAID[:turns], RESULTS[:turns], strict=True):
        functions = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
        messages.append({"role": "assistant", "content": f"{content}\n" if content else "", "tool_calls": functions})
        messages += [{"role": "tool", "content": result} for result in results]
    return messages


@pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_the_sdk_has_tools_and_a_type_of_its_last_answer(api: str) -> None:
    agents.set_tracing_disabled(True)

    output = pydantic.create_model("Output", value=(int, ...))

    async def agent(task: AgentTask) -> float:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            model, tools = getattr(agents, api)(task.model, client), [agents.function_tool(add)]
            if api == "OpenAIResponsesModel":
                tools.append(agents.WebSearchTool())
            assistant = agents.Agent(name="Calculator", model=model, tools=tools, output_type=output)
            result = await agents.Runner.run(assistant, "1+2?")
        return float(result.final_output.value)

    (trajectory,) = episode(agent, saying(['{add {"a": 1, "b": 2}}', '{"value": 3}'])).group.trajectories
    assert trajectory.reward == 3.0
    assert "".join(map(chr, trajectory.token_ids)).endswith('<tool:3>{"value": 3}\2')
    assert trajectory.loss_mask[-len('{"value": 3}\2') - 1 :] == [0] + [1] * len('{"value": 3}\2')


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
@pytest.mark.parametrize(
    ("api", "streamed"),
    [("OpenAIResponsesModel", False), ("OpenAIResponsesModel", True), ("OpenAIChatCompletionsModel", False)],
)
def test_the_sdk_calls_three_tools(api: str, streamed: bool, separators: tuple[str, str], tmp_path: Any) -> None:
    agents.set_tracing_disabled(True)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tiny_model")
    tokenizer.chat_template = TEMPLATE
    parsers, left = tool_calls.ToolCallParsers(tokenizer, ["hermes"]), iter(answers(separators))
    told: list[Any] = []

    def answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
        text = next(left)
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id], text

    def parse(body: dict[str, Any]) -> list[dict[str, Any]]:
        told.append(body["tools"])
        return [msgspec.to_builtins(found) for found in parsers.parse(msgspec.convert(body, ToolCallsBody))]

    async def agent(task: AgentTask) -> float:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            model, tools = getattr(agents, api)(task.model, client), [agents.function_tool(f) for f in (multiply, add)]
            assistant = agents.Agent(name="Calculator", instructions="Calculate.", model=model, tools=tools)
            if streamed:
                result: Any = agents.Runner.run_streamed(assistant, "3*4+5*6?")
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(assistant, "3*4+5*6?")
        return float(result.final_output == "It is 42.")

    server = FakeServer(models={str(V1)}, answer=answer, parse=parse)
    kept = ConversationFile(RunFolder(tmp_path), 1 << 20)
    made = episode(
        agent, server, parser="hermes", formatter=Formatter(tokenizer=tokenizer), max_model_len=4096, kept=kept
    )
    (trajectory,) = made.group.trajectories
    assert trajectory.reward == 1.0
    sampled = [[*tokenizer.encode(text, add_special_tokens=False), 1] for text in answers(separators)]
    if separators == (", ", ": "):  # as the template writes calls: every prompt is what it makes of the messages
        for turns, request in enumerate(server.requests):
            want = tokenizer.apply_chat_template(
                written(turns), tools=told[0], add_generation_prompt=True, return_dict=False
            )
            assert tokenizer.decode(request["prompt"]) == tokenizer.decode(want)
            assert request["prompt"] == want
    at = 0
    for request, ids in zip(server.requests, sampled, strict=True):
        begin = len(request["prompt"])
        assert trajectory.token_ids[:begin] == request["prompt"]
        assert trajectory.token_ids[begin : begin + len(ids)] == ids, "sampled tokens stay as they were"
        assert not any(trajectory.loss_mask[at:begin])
        assert all(trajectory.loss_mask[begin : begin + len(ids)])
        at = begin + len(ids)
    assert len(trajectory.token_ids) == at
    (conversation,) = read_conversations(kept.folder)
    assert [len(request.turns) for request in conversation.requests] == [2, 2, 1]
    assert [turn.content for request in conversation.requests[1:] for turn in request.turns] == ["12", "30", "42"]


class Thinking(ToolTokenizer):
    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, **kwargs: Any) -> str:
        text = super().apply_chat_template(conversation, add_generation_prompt=False, **kwargs)
        return text + "<think>\n" * add_generation_prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["", "</think>see "])
def test_a_call_in_a_thought_that_the_prompt_opens_is_none(end: str, stream: bool) -> None:
    parsers = tool_calls.ToolCallParsers(object(), ["hermes"])
    calls = [spelt("", [(name, {"a": 1, "b": 2})], (", ", ": ")) for name in ("multiply", "add")]
    content = f"I could {calls[0]} but{end}"
    server = saying([content + calls[1] * bool(end)])
    server.parse = lambda body: msgspec.to_builtins(parsers.parse(msgspec.convert(body, ToolCallsBody)))

    async def agent(task: AgentTask) -> float:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            asked: dict[str, Any] = {"model": task.model, "messages": MESSAGES, "tools": [TOOL]}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
        assert message.content == content
        assert [call.function.name for call in message.tool_calls or ()] == ["add"] * bool(end)
        return 1.0

    episode(agent, server, parser="hermes", formatter=Formatter(tokenizer=Thinking()))

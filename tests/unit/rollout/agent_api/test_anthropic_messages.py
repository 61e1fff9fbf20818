"""Anthropic's own client against the real endpoint: tools, streams, stop reasons, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from areal_lora.rollout.agents import AgentTask
from areal_lora.rollout.workflow import Episode
from tests.support.lazy import Lazy
from tests.support.rollout.agent_endpoint import FUNCTION, MESSAGES, episode, saying
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.texts import EOS

anthropic = Lazy("anthropic")

ODD = 'ok {add {"a":1.0,  "b":2}}'  # neither how the template writes it nor the client
TOOL: Any = {"name": "add", "description": "Add.", "input_schema": FUNCTION["parameters"]}
SYSTEM: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]


def run(agent: Callable[[anthropic.AsyncAnthropic, str], Any], server: FakeServer) -> Episode:
    async def called(task: AgentTask) -> float:
        url = task.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=task.api_key, max_retries=0) as client:
            await agent(client, task.model)
        return 1.0

    return episode(called, server)


async def answer(client: anthropic.AsyncAnthropic, stream: bool, **body: Any) -> anthropic.types.Message:
    if not stream:
        return await client.messages.create(max_tokens=8, **body)
    async with client.messages.stream(max_tokens=8, **body) as events:
        texts = [text async for text in events.text_stream]
        message = await events.get_final_message()
    assert len(texts) > 1, "text comes as it is sampled"
    assert "".join(texts) == message.content[0].text
    return message


@pytest.mark.parametrize("stream", [False, True])
def test_messages_with_tools_are_one_trajectory_of_the_sampled_tokens(stream: bool) -> None:
    async def agent(client: anthropic.AsyncAnthropic, model: str) -> None:
        body = {"model": model, "system": SYSTEM, "tools": [TOOL], "stream": stream}
        first = await answer(client, messages=MESSAGES, **body)
        text, call = first.content
        assert (text.type, text.text, call.type, call.name) == ("text", "ok ", "tool_use", "add")
        assert (call.input, first.stop_reason, first.role) == ({"a": 1.0, "b": 2}, "tool_use", "assistant")
        assert first.usage.output_tokens == len(ODD) + 1
        given = [block.model_dump(exclude_none=True) for block in first.content]
        given[1]["input"]["a"] = 1  # as JavaScript spells it
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}, *given]},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ]
        counted = await client.messages.count_tokens(model=model, messages=messages, system=SYSTEM, tools=[TOOL])
        last = await answer(client, messages=messages, **body)
        assert (last.content[0].text, last.stop_reason, last.stop_sequence) == ("it is 3", "end_turn", None)
        assert last.usage.input_tokens == counted.input_tokens

    (made,) = run(agent, saying([ODD, "it is 3"])).group.trajectories
    told = "[add]<system:be brief><user:hi>"
    ids = [*map(ord, told + ODD), EOS, *map(ord, "<tool:3><user:so?>it is 3"), EOS]
    sampled = [0] * len(told) + [1] * (len(ODD) + 1) + [0] * len("<tool:3><user:so?>") + [1] * 8
    assert (made.token_ids, made.loss_mask) == (ids, sampled)
    logprobs = [-0.5 * (t + 1) for t in range(len(ODD) + 1)]
    assert made.rollout_logprobs[len(told) :][: len(logprobs)] == logprobs


@pytest.mark.parametrize("blocks", [True, False])
def test_claude_codes_attribution_which_each_request_has_another_of_is_no_part_of_the_prompt(blocks: bool) -> None:
    async def agent(client: anthropic.AsyncAnthropic, model: str) -> None:
        messages: list[Any] = list(MESSAGES)
        for turn in range(2):
            header = f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};"
            told: Any = [{"type": "text", "text": header}, *SYSTEM] if blocks else header
            inline = {"role": "system", "content": told}
            reply = await client.messages.create(
                model=model, max_tokens=8, system=told, messages=[messages[0], inline, *messages[1:]]
            )
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "so?"}]

    (made,) = run(agent, saying(["ok", "yes"])).group.trajectories
    system = "<system:be brief>" * blocks
    ids = [*map(ord, f"{system}<user:hi>{system}ok"), EOS, *map(ord, "<user:so?>yes"), EOS]
    assert made.token_ids == ids


def test_stop_reasons() -> None:
    def cut(body: dict[str, Any]) -> None:
        body["choices"][0] |= {"finish_reason": "length"}

    server = saying(["1=", "ab"])
    server.fault = lambda k: Fault(edit=cut) if k else None

    async def agent(client: anthropic.AsyncAnthropic, model: str) -> None:
        body: dict[str, Any] = {"model": model, "max_tokens": 8, "messages": MESSAGES}
        stopped = await client.messages.create(stop_sequences=["x", "="], **body)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "=")
        assert (await client.messages.create(**body)).stop_reason == "max_tokens"

    run(agent, server)
    assert server.requests[0]["stop"] == ["x", "="]


def test_a_tool_can_be_forced() -> None:
    called = '[{"name": "add", "parameters": {"a": 1}}]'

    async def agent(client: anthropic.AsyncAnthropic, model: str) -> None:
        body: dict[str, Any] = {"model": model, "max_tokens": 8, "messages": MESSAGES}
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            message = await client.messages.create(**body, tools=[TOOL, TOOL | {"name": "sub"}], tool_choice=choice)
            assert [(block.type, block.input) for block in message.content] == [("tool_use", {"a": 1})]
        await client.messages.create(**body)

    server = saying([called, called, "hey"])
    run(agent, server)
    kinds = [request["structured_outputs"]["json"].get("maxItems") for request in server.requests[:2]]
    assert kinds == [None, 1]


def test_errors_have_anthropics_shape() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "x"}}

    async def agent(client: anthropic.AsyncAnthropic, model: str) -> None:
        body: dict[str, Any] = {"model": model, "max_tokens": 8, "messages": MESSAGES}
        refused: list[tuple[dict[str, Any], str]] = [
            ({"extra_body": {"temperature": 0.3}}, "temperature 0.3"),
            ({"messages": [{"role": "user", "content": [image]}]}, "type image"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
            ({"messages": []}, "messages"),
            ({"system": "x" * 2041}, r"prompt is too long: 2059 tokens > 2047 maximum"),
        ]
        for change, words in refused:
            with pytest.raises(anthropic.BadRequestError, match=words) as caught:
                await client.messages.create(**(body | change))
            assert caught.value.body["type"] == "error"
            assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError, match="only 'math'"):
            await client.messages.create(**(body | {"model": "claude"}))
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**body)
        bearer = anthropic.AsyncAnthropic(base_url=client.base_url, auth_token=client.api_key)
        assert (await bearer.messages.create(**body)).content[0].text == "hey"
        older = client.with_options(default_headers={"Authorization": "", "X-Api-Key": str(client.api_key)})
        assert (await older.messages.create(**body)).content[0].text == "hey"
        none: Any = {"type": "none"}
        await client.messages.create(**body, tools=[TOOL], tool_choice=none)

    server = saying(["hey"] * 3)
    run(agent, server)
    assert "".join(map(chr, server.requests[2]["prompt"])) == "<user:hi>"

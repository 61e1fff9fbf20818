"""OpenAI's own client against the real endpoint: tools, streams, responses. Tokens as the chat template writes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from itertools import groupby
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from areal_lora.data.collate import collate
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.rollout.agent_api import endpoint
from areal_lora.rollout.agents import AgentTask
from areal_lora.rollout.completion_client import GenerationFault
from areal_lora.rollout.workflow import Episode
from areal_lora.types import RouteShape
from tests.support.lazy import Lazy
from tests.support.rollout.agent_endpoint import (
    FUNCTION,
    MESSAGES,
    TOOL,
    ToolTokenizer,
    asked,
    episode,
    find_calls,
    saying,
)
from tests.support.rollout.fake_server import FakeServer, Fault, routes_of
from tests.support.rollout.texts import EOS, Graded

openai = Lazy("openai")

CALL = 'ok{add {"a": 1, "b": 2}}'
ODD = 'ok{add {"a":1,  "b":2}}'  # not how the template writes it
FLAT = {"type": "function", "strict": True} | FUNCTION


def run(agent: Callable[[openai.AsyncOpenAI, str], Any], server: FakeServer) -> Episode:
    async def called(task: AgentTask) -> float:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            await agent(client, task.model)
        return 1.0

    return episode(called, server)


def oracle(*parts: tuple[str, str]) -> tuple[list[int], list[int]]:
    """Token ids and mask of what was told and what was sampled in turn."""
    ids: list[int] = []
    mask: list[int] = []
    for kind, text in parts:
        new = [*map(ord, text)] + [EOS] * (kind == "sampled")
        ids += new
        mask += [int(kind == "sampled")] * len(new)
    return ids, mask


@pytest.mark.parametrize("first", [CALL, ODD])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_tools_is_one_trajectory_of_the_sampled_tokens(first: str, stream: bool) -> None:
    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        messages: list[Any] = list(MESSAGES)
        for turn in range(2):
            asked = {"model": model, "messages": messages, "tools": [TOOL]}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    seen = [event.type async for event in events]
                    choice = (await events.get_final_completion()).choices[0]
                assert ("tool_calls.function.arguments.done" in seen) is (turn == 0)
            else:
                choice = (await client.chat.completions.create(**asked)).choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            if turn == 0:
                (call,) = choice.message.tool_calls
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", "ok")
                assert call.function.name == "add"
                assert len(call.id) == 9
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
            else:
                assert (choice.finish_reason, choice.message.content) == ("stop", "it is 3")

    server, shape = saying([first, "it is 3"]), RouteShape(layers=3, per_token=2, experts=300)
    server.routes = shape
    episode = run(agent, server)
    (made,), (turns,) = episode.group.trajectories, (json.loads(text) for text in episode.turns)
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", "hi"),
        ("assistant", "ok"),
        ("tool", "3"),
        ("assistant", "it is 3"),
    ]
    [called] = turns[1]["tool_calls"]
    assert (called["function"], called["id"]) == (
        {"name": "add", "arguments": {"a": 1, "b": 2}},
        turns[2]["tool_call_id"],
    )
    want = oracle(("told", "[add]<user:hi>"), ("sampled", first), ("told", "<tool:3>"), ("sampled", "it is 3"))
    assert (made.token_ids, made.loss_mask) == want
    batch = collate(PackedGroups.of([episode.group], shape))
    assert batch.routes is not None
    assert batch.routes.tolist() == routes_of(shape, made.token_ids).tolist(), "all tokens but the last were read"
    if first == CALL:  # what the template itself writes of the whole conversation
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        turns: list[Any] = [*MESSAGES, {"role": "assistant", "content": "ok", "tool_calls": [call]}]
        turns += [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "it is 3"}]
        text = ToolTokenizer().apply_chat_template(turns, tokenize=False, add_generation_prompt=False, tools=[TOOL])
        assert made.token_ids == [ord(c) for c in text]


@pytest.mark.parametrize("by_id", [False, True])
def test_responses_with_tools_are_one_trajectory_of_the_sampled_tokens(by_id: bool) -> None:
    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        asked: dict[str, Any] = {"model": model, "tools": [FLAT], "instructions": "be brief"}
        first = await client.responses.create(input="hi", **asked)
        said, call = first.output
        assert (said.type, first.status, first.output_text) == ("message", "completed", "ok")
        assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a":1,  "b":2}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if by_id:
            last = await client.responses.create(input=[result], previous_response_id=first.id, **asked)
        else:
            items: list[Any] = [{"role": "user", "content": "hi"}]
            items += [item.model_dump(exclude_none=True) for item in first.output]
            last = await client.responses.create(input=[*items, result], **asked)
        assert last.output_text == "it is 3"
        assert last.usage is not None
        assert last.usage.total_tokens == last.usage.input_tokens + len("it is 3") + 1

    (made,) = run(agent, saying([ODD, "it is 3"])).group.trajectories
    begin = "[add]<system:be brief><user:hi>"
    want = oracle(("told", begin), ("sampled", ODD), ("told", "<tool:3>"), ("sampled", "it is 3"))
    assert (made.token_ids, made.loss_mask) == want


@pytest.mark.parametrize("instructed", [False, True])
def test_a_response_that_continues_another_has_its_messages_and_not_its_instructions(instructed: bool) -> None:
    told: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "be fast"},
    ]

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        settings: Any = {"instructions": "be brief"} if instructed else {}
        first = await client.responses.create(model=model, input=told, **settings)
        then = await client.responses.create(model=model, input="so?", previous_response_id=first.id)
        settings = {"instructions": "be loud"} if instructed else {}
        await client.responses.create(model=model, input="and?", previous_response_id=then.id, **settings)

    server = saying(["a", "b", "c"])
    run(agent, server)
    prompts = ["".join(map(chr, request["prompt"])) for request in server.requests]
    assert prompts == [
        "<system:be brief>" * instructed + "<system:be kind><user:hi><system:be fast>",
        "<system:be kind><user:hi><system:be fast>a\2<user:so?>",
        "<system:be loud>" * instructed + "<system:be kind><user:hi><system:be fast>a\2<user:so?>b\2<user:and?>",
    ]


def test_a_streamed_response_has_the_events_of_openai() -> None:
    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        async with client.responses.stream(model=model, input="hi", tools=[FLAT]) as events:
            every = [event.type.removeprefix("response.") async for event in events]
            seen = [name for name, _ in groupby(every)]  # a letter an event
            final = await events.get_final_response()
        text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
        call = ["function_call_arguments.delta", "function_call_arguments.done"]
        items = [name for body in (text, call) for name in ("output_item.added", *body, "output_item.done")]
        assert seen == ["created", "in_progress", *items, "completed"]
        assert (final.output_text, final.output[1].name) == ("ok", "add")

    run(agent, saying([CALL]))


def test_a_streamed_chat_ends_with_its_usage() -> None:
    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        stream = await client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, logprobs=True, n=2
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 2 * 4
        assert chunks[-1].choices == []
        text = ["".join(c.delta.content or "" for k in chunks for c in k.choices if c.index == i) for i in (0, 1)]
        assert text == ["hey", "you"]
        parts = [(c.index, c.logprobs.content) for k in chunks for c in k.choices if c.logprobs]
        values = [[row.logprob for i, rows in parts if i == index for row in rows] for index in (0, 1)]
        assert values == [[-0.5, -1.0, -1.5, -2.0]] * 2
        assert [e.content async for e in _events(client, model) if e.type == "content.done"] == ["now"]
        texts = [t async for t in await client.completions.create(model=model, prompt="a", stream=True)]
        assert [c.choices[0].text for c in texts] == [*"end", ""]

    run(agent, saying(["hey", "you", "now", "end"]))


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_stream_is_sent_as_the_server_samples(api: str) -> None:
    """The server samples a token only once the agent has got the text of the one before."""
    got = asyncio.Semaphore(1)
    server = saying(["hey"])
    server.between_parts = lambda _: asyncio.wait_for(got.acquire(), 240.0)

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        if api == "chat":
            chunks = await client.chat.completions.create(model=model, messages=MESSAGES, stream=True)
            texts = (chunk.choices[0].delta.content async for chunk in chunks)
        else:
            events = await client.responses.create(model=model, input="hi", stream=True)
            texts = (event.delta async for event in events if event.type == "response.output_text.delta")
        seen = ""
        async for text in texts:
            if text:
                seen += text
                got.release()
                if seen == "hey":
                    got.release()  # of the end of sequence, which has no text
        assert seen == "hey"

    (made,) = run(agent, server).group.trajectories
    assert (made.token_ids, made.loss_mask) == oracle(("told", "<user:hi>"), ("sampled", "hey"))
    assert made.rollout_logprobs[-4:] == [-0.5, -1.0, -1.5, -2.0]
    assert made.columns.runs.tolist() == [[-1, 9], [1, 4]]


def test_an_agent_that_leaves_a_stream_ends_the_sequence() -> None:
    server, stuck = saying(["hey", "now"]), asyncio.Event()
    server.between_parts = lambda t: stuck.wait() if t == 1 and len(server.requests) == 1 else asyncio.sleep(0)

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        async with await client.chat.completions.create(model=model, messages=MESSAGES, stream=True) as chunks:
            async for chunk in chunks:
                if chunk.choices[0].delta.content:
                    break
        async with asyncio.timeout(240.0):
            while server.open_requests:
                await asyncio.sleep(0.01)
        await client.chat.completions.create(model=model, messages=MESSAGES)

    (made,) = run(agent, server).group.trajectories
    assert (made.token_ids, made.loss_mask) == oracle(("told", "<user:hi>"), ("sampled", "now"))


def test_a_stream_that_breaks_off_is_an_error_of_its_client_and_a_fault_of_the_group() -> None:
    server = saying(["hey"] * 2)

    async def fail(t: int) -> None:
        if t == 2:
            raise ConnectionResetError

    server.between_parts = fail

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        chunks = await client.chat.completions.create(model=model, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="connection"):
            async for _ in chunks:
                pass
        await asyncio.sleep(600)

    with pytest.raises(GenerationFault, match="connection: "):
        run(agent, server)


async def _events(client: openai.AsyncOpenAI, model: str) -> AsyncIterator[Any]:
    async with client.chat.completions.stream(model=model, messages=MESSAGES) as stream:
        async for event in stream:
            yield event


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    def cut(body: dict[str, Any]) -> None:
        body["choices"][0]["finish_reason"] = "length"

    server = saying(["abc"] * 2)
    server.fault = lambda _: Fault(edit=cut)

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        reply = await client.chat.completions.create(model=model, messages=MESSAGES, tools=[TOOL])
        assert reply.choices[0].finish_reason == "length"
        cut = await client.responses.create(model=model, input="hi")
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    run(agent, server)


def test_parallel_calls_can_be_declined_and_tools_not_told() -> None:
    both = 'x{add {"a": 1}}{add {"a": 2}}'

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        for parallel, n in ((True, 2), (False, 1)):
            reply = await client.chat.completions.create(
                model=model, messages=MESSAGES, tools=[TOOL], parallel_tool_calls=parallel
            )
            assert len(reply.choices[0].message.tool_calls) == n
        reply = await client.chat.completions.create(model=model, messages=MESSAGES, tools=[TOOL], tool_choice="none")
        assert reply.choices[0].message.content == both

    made = run(agent, saying([both] * 3)).group.trajectories
    assert all(sum(t.loss_mask) == len(both) + 1 for t in made), "all of it was sampled, and is trained on"
    assert "".join(map(chr, made[-1].token_ids)).startswith("<user:hi>")


def test_half_a_surrogate_pair_in_a_call_ends_nothing() -> None:
    """JSON can spell it, and a model does; the arguments stay as they were written."""
    call = r'ok{add {"a": "\ud83d", "b": 2}}'

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        reply = await client.chat.completions.create(model=model, messages=MESSAGES, tools=[TOOL])
        message = reply.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
        again = [*MESSAGES, message.model_dump(exclude_none=True), result]
        await client.chat.completions.create(model=model, messages=again, tools=[TOOL])

    made = run(agent, saying([call, "so 7"]))
    assert len(made.group.trajectories) == 1
    assert r'"\\ud83d\"' in made.turns[0]


def test_a_call_that_a_stop_text_ends_is_parsed_without_it() -> None:
    texts: list[str] = []

    def parse(body: dict[str, Any]) -> list[dict[str, Any]]:
        texts.extend(body["texts"])
        return [{"content": "", "calls": []} for _ in body["texts"]]

    server = saying(["12=x"])
    server.parse = parse

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        await client.chat.completions.create(model=model, messages=MESSAGES, tools=[TOOL], stop="=")

    run(agent, server)
    assert texts == ["12"]


def test_the_keys_model_is_listed_and_errors_name_their_field() -> None:
    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        assert [m.id async for m in client.models.list()] == [model]
        assert (await client.models.retrieve(model)).id == model
        with pytest.raises(openai.NotFoundError, match="only 'math'"):
            await client.models.retrieve("gpt-4o")
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            await client.responses.create(model=model, input="hi", temperature=0.0)
        assert caught.value.param == "temperature"
        await client.chat.completions.create(model=model, messages=MESSAGES)

    run(agent, saying(["hey"]))


def test_the_configured_reward_gets_the_conversation_of_the_last_answer_as_the_agent_sent_it() -> None:
    spelt, scorer = f'{{"a": {10**30}}}', Graded()  # a number that msgpack does not have

    async def agent(task: AgentTask) -> None:
        await asked(task, messages=[{"role": "user", "content": "another conversation"}])
        messages: list[Any] = [{"role": "system", "content": "Calculate."}, *MESSAGES]
        _, reply = await asked(task, messages=messages, tools=[TOOL])
        messages.append(reply["choices"][0]["message"])
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "3"})
        await asked(task, messages=messages, tools=[TOOL])
        sent.extend(messages)

    sent = list[Any]()
    episode(agent, saying(["hm", f"ok{{add {spelt}}}", "three"]), scorer=scorer)
    (item,) = scorer.asked
    want = [{name: m[name] for name in ("role", "content", "tool_calls", "tool_call_id") if name in m} for m in sent]
    assert item.messages == [*want, {"role": "assistant", "content": "three"}]
    assert item.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": spelt}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(item))["messages"] == item.messages


@pytest.mark.parametrize("prompt", ["Q: hi\nA:", [*map(ord, "Q: hi\nA:")]])
def test_the_configured_reward_gets_the_plain_prompt_of_the_last_answer(prompt: str | list[int]) -> None:
    async def agent(task: AgentTask) -> None:
        await asked(task, "/completions", prompt=prompt)

    scorer = Graded()
    episode(agent, saying(["hey"]), scorer=scorer)
    (item,) = scorer.asked
    assert item.messages == [{"role": "user", "content": "Q: hi\nA:"}, {"role": "assistant", "content": "hey"}]


SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
CALLS = '[{"name": "add", "parameters": {"a": 1}}]'


def test_an_answer_under_a_grammar_is_given_back_and_not_trained() -> None:
    tool: Any = {"type": "function", "function": FUNCTION | {"parameters": SCHEMA}}
    other: Any = {"type": "function", "function": {"name": "sub"}}

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        body: dict[str, Any] = {"model": model, "tools": [tool, other]}
        reply = await client.chat.completions.create(messages=MESSAGES, tool_choice="required", **body)
        (call,) = reply.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert reply.choices[0].finish_reason == "tool_calls"
        given: list[Any] = [*MESSAGES, reply.choices[0].message.model_dump(exclude_none=True)]
        given.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        named: Any = {"type": "function", "function": {"name": "add"}}
        await client.chat.completions.create(messages=MESSAGES, tool_choice=named, **body)
        assert (await client.chat.completions.create(messages=given, **body)).choices[0].message.content == "three"
        as_json: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        await client.chat.completions.create(model=model, messages=MESSAGES, response_format=as_json)
        await client.responses.create(model=model, input="hi", text={"format": {"type": "json_object"}})

    server = saying([CALLS, CALLS, "three", "{}", "{}"])
    (made,) = run(agent, server).group.trajectories
    told = "[add][sub]<user:hi>" + CALLS + chr(EOS) + "<tool:3>"
    assert (made.token_ids, made.loss_mask) == oracle(("told", told), ("sampled", "three"))
    asked = [request.get("structured_outputs", {}).get("json") for request in server.requests]
    required, named, free, schema, anything = asked
    assert (free, schema, anything) == (None, SCHEMA, {"type": "object"})
    assert (named["maxItems"], [kind["properties"]["name"]["enum"] for kind in named["items"]["anyOf"]]) == (
        1,
        [["add"]],
    )
    assert required["$defs"] == SCHEMA["$defs"], "references are from the root"
    jsonschema.validate(json.loads(CALLS), required)
    for wrong in ([], [{"name": "mul", "parameters": {}}], [{"name": "add", "parameters": {"a": "1"}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, required)


def test_an_agent_without_an_answer_of_the_policy_has_nothing_to_train() -> None:
    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        await client.chat.completions.create(model=model, messages=MESSAGES, response_format={"type": "json_object"})

    with pytest.raises(GenerationFault, match="without a completion that no grammar chose"):
        run(agent, saying(["{}"] * 2))


def test_a_stream_with_tools_holds_back_what_may_be_a_call() -> None:
    texts: list[list[str]] = []

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        for _ in range(2):
            chunks = await client.chat.completions.create(model=model, messages=MESSAGES, tools=[TOOL], stream=True)
            texts.append([c.choices[0].delta.content async for c in chunks if c.choices[0].delta.content])

    run(agent, saying(["so: a < b.", CALL]))
    assert texts == [[*"so:", " a", " < b."], [*"ok"]]


@pytest.mark.parametrize("rest", ["</think>\n\n" + CALL, "</think>\n\nso", ""])
def test_a_stream_with_tools_has_the_thought_as_it_comes(rest: str) -> None:
    """The server samples on only once the agent has got the thought, up to what may be a part of its end."""
    thought, got = f"<think>{{add? [{'x' * 50}", asyncio.Event()
    server = saying([thought + rest])
    server.between_parts = lambda t: asyncio.wait_for(got.wait(), 240.0) if t == len(thought) else asyncio.sleep(0)

    async def agent(client: openai.AsyncOpenAI, model: str) -> None:
        chunks = await client.chat.completions.create(model=model, messages=MESSAGES, tools=[TOOL], stream=True)
        seen, calls = "", list[str]()
        async for chunk in chunks:
            seen += chunk.choices[0].delta.content or ""
            calls += [call.function.name for call in chunk.choices[0].delta.tool_calls or ()]
            if len(seen) >= len(thought) - len("</think>"):
                got.set()
        assert (thought + rest).startswith(seen)
        assert calls == ["add"] * ("{" in rest)
        if not calls:
            assert seen == thought + rest

    def parse(body: dict[str, Any]) -> list[dict[str, Any]]:
        """As a server: without the calls of thoughts."""
        thought, end, said = body["texts"][0].partition("</think>")
        (found,) = find_calls({"texts": [said]})
        return [found | {"content": thought + end + found["content"]}]

    server.parse = parse
    run(agent, server)


def test_a_stream_that_is_held_back_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.01)
    server, seen = saying([CALL]), asyncio.Event()
    server.between_parts = lambda t: asyncio.wait_for(seen.wait(), 240.0) if t == len(CALL) - 1 else asyncio.sleep(0)

    async def agent(task: AgentTask) -> float:
        headers, comments, events = {"Authorization": f"Bearer {task.api_key}"}, 0, list[Any]()
        body = {"model": task.model, "messages": MESSAGES, "tools": [TOOL], "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{task.base_url}/chat/completions", json=body, headers=headers) as response,
        ):
            async for line in response.content:
                comments += line.startswith(b":")
                if comments == 3:
                    seen.set()
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        return 1.0

    (made,) = episode(agent, server).group.trajectories
    assert made.loss_mask.count(1) == len(CALL) + 1

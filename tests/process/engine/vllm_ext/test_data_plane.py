"""Bodies that a data plane refuses, on a real server that stays up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from typing import Any

import aiohttp
import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from areal_lora.engine.vllm_ext.server.openai_api import ChatBody, CompletionBody
from tests.support.clocks import seen
from tests.support.edges import EDGES, RAW, written
from tests.support.engine.vllm_ext.serving import PROMPT, RunningServer
from tests.support.sizes import size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
N_REQUESTS = size(320, 20_000)


def ask(server: RunningServer, *bodies: dict[str, Any], path: str = "/v1/completions") -> list[tuple[int, Any]]:
    async def run() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession() as session:
            return [await server.post(session, path, **body) for body in bodies]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[5]] * 60_000, "n": 16_384},  # 240 KiB: 983 million sequences
        {"prompt": "a", "n": 1025},
        {"prompt": ["a"] * 1025},
        {"prompt": "a", "n": 1024, "max_tokens": 250, "logprobs": 200},
    ],
)
def test_a_request_for_too_many_sequences_is_refused_at_once(server: RunningServer, body: dict[str, Any]) -> None:
    [(status, answer), (after, _)] = ask(
        server, {"model": "base"} | body, {"model": "base", "prompt": PROMPT, "max_tokens": 1}
    )
    assert (status, after) == (400, 200)
    assert "send several requests" in answer["error"]["message"]


@pytest.mark.parametrize("logprobs", [0, 2])
def test_a_prompt_as_long_as_the_context_is_scored_like_hugging_face(server: RunningServer, logprobs: int) -> None:
    """``max_tokens`` 0 with ``echo``: what ``compute_logprobs`` of the SDK becomes; short prompts as well."""
    context, tensors = server.config.rollout.max_model_len, server.adapter(3)
    server.publish(tensors)
    long = [(37 * i) % 251 + 5 for i in range(context)]
    body = {"model": "math", "echo": True, "max_tokens": 0, "logprobs": logprobs, "return_token_ids": True}
    answers = ask(server, *({"prompt": ids} | body for ids in (long, long[:1], long[:7])))
    for ids, (status, answer) in zip((long, long[:1], long[:7]), answers, strict=True):
        assert status == 200, answer
        [choice] = answer["choices"]
        assert choice["token_ids"] == ids
        scores = choice["logprobs"]["token_logprobs"]
        assert scores == pytest.approx(server.logprobs(tensors, ids), abs=1e-4)
        for token, value, row in zip(ids[1:], scores[1:], choice["logprobs"].get("top_ids", [{}])[1:], strict=False):
            assert row[str(token)] == value
    without = {"model": "math", "prompt": long}
    refused = ask(server, without | {"max_tokens": 1}, without | {"max_tokens": 0}, body | {"prompt": [*long, 5]})
    assert [status for status, _ in refused] == [400, 400, 400]


@pytest.mark.parametrize("background", [True, False])
def test_a_rollout_starts_before_the_tenants_requests_that_wait(server: RunningServer, background: bool) -> None:
    """Of 256 sequences 64 run at a time, 12 of 16 requests end before the last one starts."""
    tenants = {"model": "base", "prompt": PROMPT[:4], "n": 16, "max_tokens": 24, "ignore_eos": True}

    async def run() -> int:
        async with aiohttp.ClientSession() as session:

            async def requests() -> int:
                async with session.get(server.url("/metrics")) as response:
                    return int(re.findall(r"^areal_lora_requests_total (\d+)", await response.text(), re.M)[0])

            before = await requests()
            asked = [asyncio.create_task(server.post(session, **tenants, background=background)) for _ in range(16)]
            while await requests() < before + 12 and not all(each.done() for each in asked):
                pass
            status, _ = await server.post(session, model="base", prompt=PROMPT[:4], max_tokens=2)
            assert status == 200
            done = sum(each.done() for each in asked)
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            return done

    seen(lambda: asyncio.run(run()), lambda done: (done < 12) is background)


FIELDS: dict[str, list[Any]] = {
    "n": [1, 2, 1024, 1025, 16_384],
    "max_tokens": [0, 1, 2, 3, 255, 256],
    "logprobs": [-1, 0, 5, 20, 21, 288, True],
    "stop": ["a", ["a", "b"], ["a"] * 3000],
    "stop_token_ids": [[1], [287], [288], [5] * 3000],
    "seed": [0, -1, 2**62],
    "top_k": [-1, 3, 2**31 - 1, 2**31],
    "stream": [True],
    "prompt": ["a", [5], [288], [5] * 255, [[5], [6]], ["a", "b"], [5, "a"], [[5]] * 2000],
    "messages": [[], [{"role": "user", "content": "a"}], [{"role": "\ud83d", "content": "a"}], [{"role": 1}]],
}


def chosen(body: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields of ``body`` with values of their own or odd ones, and perhaps one more."""
    fields = [f.encode_name for f in msgspec.structs.fields(body)]
    one = st.sampled_from([*fields, *fields, "more"]).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(FIELDS[name]) | EDGES if name in FIELDS else EDGES)
    )
    return st.lists(one, max_size=4).map(dict)


def right(path: str) -> dict[str, Any]:
    body = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    return body | {"model": "base", "max_tokens": 2}


SHOTS = st.one_of(
    *(
        chosen(body).map(lambda fields, path=path: (path, written(right(path) | fields)))  # type: ignore[misc]
        for path, body in ((COMPLETIONS, CompletionBody), (CHAT, ChatBody))
    ),
    st.sampled_from(RAW).map(lambda raw: (COMPLETIONS, raw)),
)


def test_no_body_ends_a_server_or_has_an_untyped_answer(server: RunningServer) -> None:
    """Bodies by the types of the data plane, with values at and beyond their edges, eight at a time."""
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"AREAL_LORA_SEED={seed}")
    server.publish(server.adapter(3))
    statuses: Counter[int] = Counter()
    before = ask(server, {"model": "base", "prompt": PROMPT, "max_tokens": 8, "temperature": 0.0})

    async def send(shots: list[tuple[str, bytes]]) -> None:
        async def one(session: aiohttp.ClientSession, path: str, raw: bytes) -> None:
            async with session.post(server.url(path), data=raw) as response:
                content = await response.read()
            sent = f"{path} {raw[:600]!r}: {response.status} {content[:600]!r}"
            statuses[response.status] += 1
            if response.status == 200:
                streams = response.content_type == "text/event-stream"
                assert content.endswith(b"data: [DONE]\n\n") if streams else json.loads(content)["choices"], sent
            else:
                assert response.status in (400, 404), sent
                assert json.loads(content)["error"]["message"], sent

        timeout = aiohttp.ClientTimeout(total=240.0)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for path, raw in shots:
                group.create_task(one(session, path, raw))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=N_REQUESTS // 8, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(st.lists(SHOTS, min_size=8, max_size=8))
    def storm(shots: list[tuple[str, bytes]]) -> None:
        asyncio.run(send(shots))

    storm()
    [(empty, _)] = ask(server, {"model": "base", "messages": []}, path=CHAT)
    assert empty == 400
    print(dict(statuses))
    assert {200, 400} <= statuses.keys()
    after = ask(server, {"model": "base", "prompt": PROMPT, "max_tokens": 8, "temperature": 0.0})
    assert [answer["choices"] for _, answer in after] == [answer["choices"] for _, answer in before]

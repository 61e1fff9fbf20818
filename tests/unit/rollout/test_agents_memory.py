from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest

from areal_lora.data.prompts import Formatter
from areal_lora.rollout.agent_api.endpoint import HOST, agent_gateway
from areal_lora.rollout.completion_client import CompletionRequest
from areal_lora.rollout.workflow import WorkflowContext
from areal_lora.types import AdapterRef, Generation, TokenColumns
from tests.support.rollout.texts import EOS, SAMPLING, V1, CharTokenizer, Graded


class GatedClient:
    """Answers "a" when it may."""

    pins = False

    def __init__(self) -> None:
        self.has_request, self.may_answer = asyncio.Event(), asyncio.Event()

    def newest(self, ref: AdapterRef) -> AdapterRef:
        return ref

    async def sample(self, ref: AdapterRef, request: CompletionRequest, **_: Any) -> list[Generation]:
        self.has_request.set()
        await self.may_answer.wait()
        columns = TokenColumns.of([ord("a"), EOS], [-0.5, -0.5], [1, 1])
        return [Generation(columns=columns, finish_reason="stop", text="a")]


async def posted(
    port: int, key: str, path: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request, of which nothing is kept here."""
    reader, writer = await asyncio.open_connection(HOST, port)
    text = json.dumps(body).encode()
    writer.write(
        f"POST /v1/{path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {key}\r\n"
        f"Connection: close\r\nContent-Length: {len(text)}\r\n\r\n".encode()
    )
    for at in range(0, len(text), 1 << 14):
        writer.write(text[at : at + (1 << 14)])
        await writer.drain()
    return reader, writer


@pytest.mark.parametrize(("path", "given"), [("chat/completions", "messages"), ("responses", "input")])
def test_a_waiting_turn_keeps_the_tokens_of_its_prompt_and_no_texts(path: str, given: str) -> None:
    n = 300_000
    first = {"role": "user", "content": "b" * n}
    rest = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]

    async def main() -> int:
        client: Any = GatedClient()
        formatter = Formatter(tokenizer=CharTokenizer())
        context = WorkflowContext(
            client=client, scorer=Graded(), sampling=SAMPLING, formatter=formatter, max_model_len=2 * n
        )
        async with agent_gateway() as sessions:
            async with sessions.opened(context, V1, 1) as session:
                key = session.key
                client.may_answer.set()
                answer, _writer = await posted(sessions.port, key, path, {"model": "math", given: [first]})
                assert b"200 OK" in await answer.read()
                client.has_request.clear()
                client.may_answer.clear()
                tracemalloc.start()
                answer, _writer = await posted(sessions.port, key, path, {"model": "math", given: [first, *rest]})
                await client.has_request.wait()
                await asyncio.sleep(0)
                kept, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                client.may_answer.set()
                assert b"200 OK" in await answer.read()
        assert [len(each.columns) > n for each in session.ended.conversations] == [True]
        return kept

    assert 4 * n <= asyncio.run(main()) < 4.5 * n

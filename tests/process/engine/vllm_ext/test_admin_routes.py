"""Routes of the admin plane, with adapters and an engine that note what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from areal_lora.weight_sync import messages as wire
from areal_lora.weight_sync.admin_client import RequestRelay
from areal_lora.weight_sync.messages import ScoreRequest
from tests.support.lazy import Lazy
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, shapes_of
from tests.support.weight_sync.memory_server import MemoryServer

admin_routes = Lazy("areal_lora.engine.vllm_ext.server.admin_routes")
generate = Lazy("areal_lora.engine.vllm_ext.server.generate")


def test_a_ping_shows_whether_a_publish_is_in_progress() -> None:
    async def answered() -> None: ...

    async def ask() -> list[wire.PingReply]:
        adapters: Any = SimpleNamespace(ping=answered, turn=asyncio.Lock())
        unused: Any = None
        stop: Any = SimpleNamespace(leaving=asyncio.Event())
        plane = admin_routes.AdminPlane(adapters, unused, unused, unused, stop)
        answers = [await plane.ping(unused)]
        async with adapters.turn:
            answers.append(await plane.ping(unused))
        return [msgspec.msgpack.decode(answer.body, type=wire.PingReply) for answer in answers]

    assert asyncio.run(ask()) == [wire.PingReply(), wire.PingReply(busy=True)]


def test_no_score_runs_on_when_the_request_has_given_back_its_version() -> None:
    """One sequence is refused while another one is scored: its slot must not be freed under the other."""
    log: list[str] = []

    @contextmanager
    def lease(model: str) -> Iterator[str]:
        try:
            yield model
        finally:
            log.append("given back")

    async def score(ids: list[int], lease: str, temperature: float) -> list[float]:
        if ids == [2]:
            raise generate.BadRequest("too long")
        try:
            await asyncio.Event().wait()
        finally:
            log.append("score has ended")
        return []

    async def opened() -> None: ...

    async def body() -> bytes:
        return msgspec.msgpack.encode(ScoreRequest(model="math@v1", token_ids=[[1], [2]], temperature=1.0))

    async def ask() -> None:
        adapters: Any = SimpleNamespace(has_base=True, gate=SimpleNamespace(opened=opened), lease=lease)
        generator: Any = SimpleNamespace(score=score)
        unused: Any = None
        request: Any = SimpleNamespace(body=body)
        with pytest.raises(generate.BadRequest, match="too long"):
            await admin_routes.AdminPlane(adapters, generator, unused, unused, unused).score(request)

    asyncio.run(ask())
    assert log == ["score has ended", "given back"]


def test_a_relay_returns_the_answers_of_all_servers_and_names_one_that_is_not_there() -> None:
    def score(model: str | None, ids: list[list[int]]) -> list[list[float]]:
        return [[-0.5] * len(row) for row in ids]

    async def relayed(servers: list[wire.ServerEndpoint], what: bytes) -> list[wire.RelayedAnswer]:
        async def body() -> bytes:
            wanted = wire.RelayRequest(path=wire.SCORE_PATH, body=what, servers=servers, timeout_s=120.0)
            return msgspec.msgpack.encode(wanted)

        unused: Any = None
        request: Any = SimpleNamespace(body=body)
        answer = await admin_routes.AdminPlane(unused, unused, unused, unused, unused).relay(
            RequestRelay(SECRET), request
        )
        return msgspec.msgpack.decode(answer.body, type=wire.RelayReply).answers

    with MemoryServer(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, score=score) as server:
        missing = msgspec.structs.replace(server.endpoint, name="server-1", admin_port=1)
        what = msgspec.msgpack.encode(ScoreRequest(model=None, token_ids=[[1, 2]]))
        found, none = asyncio.run(relayed([server.endpoint, missing], what))
    assert found.status == 200
    assert msgspec.msgpack.decode(found.body, type=wire.ScoreReply).logprobs == [[-0.5, -0.5]]
    assert none.status == 502
    assert b"server-1" in none.body

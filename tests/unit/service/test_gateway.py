"""Which server of the run has a request of a tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from areal_lora.errors import RequestError
from areal_lora.service import gateway
from areal_lora.service.gateway import BEHIND, Names
from tests.support.service.running import data_plane, running, service_config

Bodies = list[dict[str, Any]]


class World:
    """Two servers; ``bodies`` are what each one got. Requests wait while ``goes`` is not set."""

    def __init__(self, it: gateway.Gateway, bodies: tuple[Bodies, Bodies], goes: asyncio.Event) -> None:
        self.gateway, self.bodies, self.goes = it, bodies, goes

    async def send(self, prompt: object, model: str = "math@v1", n: int = 1) -> None:
        body = {"prompt": prompt, "n": n}
        await self.gateway.answer("/v1/completions", body, Names("it", "it", model))

    async def arrived(self, n: int) -> list[int]:
        """How many requests each server has, once there are ``n``."""
        async with asyncio.timeout(120.0):
            while sum(map(len, self.bodies)) < n:
                await asyncio.sleep(0.01)
        return [len(each) for each in self.bodies]


def play(tmp_path: Path, scene: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        goes = asyncio.Event()
        goes.set()

        async def reply(body: dict[str, Any]) -> web.StreamResponse:
            await goes.wait()
            return web.json_response({})

        async with running(service_config(tmp_path)) as it:
            async with data_plane(it, 0, reply) as first, data_plane(it, 1, reply) as second:
                await scene(World(it.api.gateway, (first, second), goes))

    asyncio.run(run())


def start(k: int) -> list[int]:
    return [1000 + k] * 100


def test_conversations_stay_on_their_servers(tmp_path: Path) -> None:
    """Eight that run side by side, each turn a third longer; they share less than a quarter of their prompts."""

    async def scene(it: World) -> None:
        prompts = {k: [7] * 30 + start(k) for k in range(8)}
        for turn in range(6):
            it.goes.clear()
            order = [k * (1, 3, 5, 7)[turn % 4] % 8 ^ turn // 2 for k in range(8)]
            sent = [asyncio.create_task(it.send(prompts[k])) for k in order]
            await asyncio.sleep(0)
            it.goes.set()
            await asyncio.gather(*sent)
            prompts = {k: prompt + start(k)[: len(prompt) // 3] for k, prompt in prompts.items()}
        at = [{body["prompt"][30] for body in bodies} for bodies in it.bodies]
        assert (at[0] & at[1], len(at[0]), len(at[1])) == (set(), 4, 4)

    play(tmp_path, scene)


def test_a_server_is_full_at_so_many_sequences_more_than_another(tmp_path: Path) -> None:
    async def scene(it: World) -> None:
        it.goes.clear()
        sent = [asyncio.create_task(it.send(start(0))) for _ in range(BEHIND + 1)]
        assert sorted(await it.arrived(BEHIND + 1)) == [0, BEHIND + 1]
        sent += [asyncio.create_task(it.send(start(0))) for _ in range(2 * BEHIND)]
        assert min(await it.arrived(3 * BEHIND + 1)) >= BEHIND
        it.goes.set()
        await asyncio.gather(*sent)
        assert it.gateway._busy == {}

    play(tmp_path, scene)


def test_sequences_count_not_requests(tmp_path: Path) -> None:
    async def scene(it: World) -> None:
        it.goes.clear()
        sent = [asyncio.create_task(it.send([0], n=8))]
        await it.arrived(1)
        for k in range(8):
            sent.append(asyncio.create_task(it.send([k])))
            await it.arrived(k + 2)
        assert sorted(map(len, it.bodies)) == [1, 8]
        it.goes.set()
        await asyncio.gather(*sent)

    play(tmp_path, scene)


def test_another_version_has_nothing_in_the_cache_of_this_one(tmp_path: Path) -> None:
    async def scene(it: World) -> None:
        await it.send(start(0))
        it.goes.clear()
        sent = [asyncio.create_task(it.send([1]))]  # the least busy one, as is the first of equals
        await it.arrived(2)
        sent.append(asyncio.create_task(it.send(start(0), model="math@v2")))
        assert await it.arrived(3) == [2, 1]
        sent.append(asyncio.create_task(it.send(start(0))))
        assert await it.arrived(4) == [3, 1]
        it.goes.set()
        await asyncio.gather(*sent)

    play(tmp_path, scene)


def test_homes_are_bounded_and_the_oldest_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "HOMES", 3)

    async def scene(it: World) -> None:
        for k in range(9):
            await it.send(start(k))
            await it.send(start(0))
        assert len(it.gateway._homes) == 3
        kept = [key for k in (7, 8, 0) for key in gateway._starts("math@v1", {"prompt": start(k)})]
        assert set(it.gateway._homes) == set(kept)

    play(tmp_path, scene)


def test_a_conversation_whose_server_has_ended_stays_on_another(tmp_path: Path) -> None:
    async def run() -> None:
        async def reply(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({})

        async def unfit(body: dict[str, Any]) -> web.StreamResponse:
            return web.Response(status=503)

        async with running(service_config(tmp_path)) as it:
            names = Names("it", "it", "math@v1")
            async with data_plane(it, 0, unfit) as first:
                with pytest.raises(RequestError):
                    await it.api.gateway.answer("/v1/completions", {"prompt": start(0)}, names)
                async with data_plane(it, 1, reply) as second:
                    for _ in range(3):
                        await it.api.gateway.answer("/v1/completions", {"prompt": start(0)}, names)
            assert (len(first), len(second)) == (2, 3)

    asyncio.run(run())


def test_a_server_that_fails_is_not_requested_again_at_once(tmp_path: Path) -> None:
    """Without an engine it answers at once: it would be the least busy one, and the home of what it failed."""

    async def run() -> None:
        async def broken(body: dict[str, Any]) -> web.StreamResponse:
            return web.Response(status=500)

        async def reply(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({})

        async with running(service_config(tmp_path)) as it:
            names = Names("it", "it", "math@v1")
            async with data_plane(it, 0, broken) as first, data_plane(it, 1, reply) as second:
                with pytest.raises(RequestError):
                    await it.api.gateway.answer("/v1/completions", {"prompt": start(0)}, names)
                for _ in range(3):
                    await it.api.gateway.answer("/v1/completions", {"prompt": start(0)}, names)
                assert [len(first), len(second)] == [1, 3]

    asyncio.run(run())

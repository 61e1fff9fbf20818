"""Requests that no server of the run sends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.support.engine.vllm_ext.remote_world import remote_run


def test_a_shard_without_its_parameters_is_a_400_and_of_an_unknown_server_a_404(tmp_path: Path) -> None:
    async def answers(app: httpx.ASGITransport, token: str) -> list[tuple[int, str]]:
        async with httpx.AsyncClient(transport=app, headers={"Authorization": f"Bearer {token}"}) as client:
            queries = ("", "?at=x&base=", "?at=0", "?at=0&base=")
            found = [await client.get(f"http://gateway/remote/nobody/shard/0/0{query}") for query in queries]
        return [(each.status_code, each.text) for each in found]

    with remote_run(tmp_path) as world:
        *without, unknown = asyncio.run(answers(httpx.ASGITransport(app=world.gateway.app()), world.token))
    assert [(status, "parameters at" in text) for status, text in without] == [(400, True)] * 3
    assert (unknown[0], "no such server" in unknown[1]) == (404, True)

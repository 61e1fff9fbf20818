"""Deterministic mode on real servers: an answer depends on its request and version, and on nothing else."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support import shared_memory
from tests.support.clocks import wait_until
from tests.support.engine.vllm_ext.serving import PROMPT, RunningServer, connect, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS: list[dict[str, Any]] = [
    {
        "prompt": PROMPT[: 5 + 3 * k],
        "seed": 100 + k,
        "n": 1 + k % 3,
        "max_tokens": 6 + 2 * k,
        "logprobs": 0,
        "return_token_ids": True,
        "temperature": 0.0 if k == 3 else 0.9,
    }
    for k in range(8)
]


async def ask(server: RunningServer, order: list[int], at_once: bool) -> dict[int, Any]:
    """Choices by request: exact numbers, as JSON carries all digits of a float."""
    async with aiohttp.ClientSession() as session:

        async def one(k: int) -> tuple[int, Any]:
            status, answer = await server.post(session, model="math", **REQUESTS[k])
            assert status == 200, answer
            return k, answer["choices"]

        if at_once:
            return dict(await asyncio.gather(*map(one, order)))
        return dict([await one(k) for k in order])


@pytest.fixture(scope="module")
def before() -> set[str]:
    return shared_memory.names()


@pytest.fixture(scope="module")
def servers(
    tiny_model: Path, before: set[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RunningServer]]:
    folder = tmp_path_factory.mktemp("deterministic")
    processes = [start(folder / name, tiny_model, deterministic=True, max_staleness=0) for name in "ab"]
    try:
        yield [connect(folder / name, tiny_model, p) for name, p in zip("ab", processes, strict=True)]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(120)


def test_two_servers_answer_bit_for_bit_alike_in_any_order(servers: list[RunningServer]) -> None:
    first, second = servers
    order = list(range(len(REQUESTS)))
    for seed in (1, 2):
        for server in servers:
            server.publish(server.adapter(seed))
        want = asyncio.run(ask(first, order, at_once=False))
        assert len(want[2]) == 3
        for way in range(2):
            random.Random(way).shuffle(order)
            assert asyncio.run(ask(second, order, at_once=way > 0)) == want
    assert first.score(first.newest) == second.score(second.newest)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_nothing_is_left_behind(servers: list[RunningServer], before: set[str]) -> None:
    """By a server that is told to end, and by one that is killed."""
    for server, number in zip(servers, (signal.SIGTERM, signal.SIGKILL), strict=True):
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children, "the engine is a child process"
        server.process.send_signal(number)
        assert server.process.wait(120) == (0 if number == signal.SIGTERM else -number)
        server.source.close()
        wait_until(lambda children=children: not any(map(alive, children)), what="the end of all children")
    wait_until(lambda: not shared_memory.left_behind(before), what="the end of what it had in memory")

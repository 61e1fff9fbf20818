"""A server that leaves: what it hands back, and when it ends."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.engine.vllm_ext.server.leaving import Door, Stop, leave_in_order, withdraw
from areal_lora.network.http_server import LEAVING_HEADER
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint, read_endpoint
from tests.support.clocks import in_virtual_time


async def answer(request: Request) -> Response:
    await asyncio.sleep(float(await request.body()))
    return Response(b"done")


APP = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"]), Route("/health", answer)])


async def post(door: Door, seconds: float, method: str = "POST", path: str = "/v1/completions") -> tuple[int, bool]:
    """Status, and whether the request was handed back."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": str(seconds).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    await door(scope, receive, send)
    names = {name.decode().lower() for name, _ in sent[0]["headers"]}
    return sent[0]["status"], LEAVING_HEADER.lower() in names


def leaving(tmp_path: Path, seconds: list[float], **times: float | None) -> tuple[list[Any], tuple[int, bool], float]:
    """`leave` in virtual time, in which only waiting takes time."""
    return in_virtual_time(leave(tmp_path, seconds, **times))  # type: ignore[arg-type]


async def leave(tmp_path: Path, seconds: list[float], *, grace_s: float, dismissed_s: float | None, busy_s: float):
    """Leave with requests of ``seconds`` in progress. (their answers, a later request's, seconds until the end)."""
    folder, loop = RunFolder(tmp_path), asyncio.get_running_loop()
    publish_endpoint(folder, "server", 3, {"data": 1, "admin": 2})
    stop, door, began = Stop(grace_s), Door(APP), loop.time()
    left = asyncio.create_task(
        leave_in_order(stop, door, busy=lambda: loop.time() < began + busy_s, publish_s=5.0, run_folder=folder, index=3)
    )
    running = [asyncio.create_task(post(door, s)) for s in seconds]
    await asyncio.sleep(0.05)
    stop.request()
    await asyncio.sleep(0.05)
    assert read_endpoint(folder, "server", 3) is not None
    late = await post(door, 0.0)
    assert (await post(door, 0.0, "GET", "/health"))[0] == 200
    if dismissed_s is not None:
        loop.call_later(dismissed_s, stop.dismissed.set)
    await stop.event.wait()
    took_s = loop.time() - began
    await left
    assert read_endpoint(folder, "server", 3) is None
    return [await r for r in running], late, took_s


def test_requests_in_progress_end_and_new_ones_are_handed_back(tmp_path: Path) -> None:
    answers, late, took_s = leaving(tmp_path, [0.3, 0.5], grace_s=30.0, dismissed_s=0.0, busy_s=0.0)
    assert answers == [(200, False), (200, False)]
    assert late == (503, True)
    assert 0.5 <= took_s < 0.7


def test_what_outlasts_the_grace_is_handed_back(tmp_path: Path) -> None:
    answers, _, took_s = leaving(tmp_path, [0.1, 60.0], grace_s=0.5, dismissed_s=0.0, busy_s=0.0)
    assert answers == [(200, False), (503, True)]
    assert 0.5 <= took_s < 0.7


def test_a_server_stays_until_it_is_dismissed_or_its_grace_is_over(tmp_path: Path) -> None:
    _, _, took_s = leaving(tmp_path, [], grace_s=30.0, dismissed_s=0.4, busy_s=0.0)
    assert 0.4 <= took_s < 0.7
    _, _, took_s = leaving(tmp_path, [], grace_s=0.6, dismissed_s=None, busy_s=0.0)
    assert 0.6 <= took_s < 0.8


def test_a_publish_in_progress_is_awaited(tmp_path: Path) -> None:
    _, _, took_s = leaving(tmp_path, [], grace_s=0.3, dismissed_s=0.0, busy_s=0.9)
    assert 0.9 <= took_s < 1.1


def test_the_first_signal_leaves_and_the_second_ends() -> None:
    async def signals() -> None:
        stop = Stop(grace_s=10.0)
        stop.request()
        assert (stop.leaving.is_set(), stop.event.is_set()) == (True, False)
        stop.request()
        assert stop.event.is_set()
        at_once = Stop()
        at_once.request()
        assert (at_once.leaving.is_set(), at_once.event.is_set()) == (False, True)

    asyncio.run(signals())


def test_a_server_leaves_when_the_run_folder_has_its_process_id(tmp_path: Path) -> None:
    folder, stop = RunFolder(tmp_path), Stop()

    async def leave_now() -> None:
        publish_endpoint(folder, "server", 3, {})
        folder.leaves.mkdir()
        (folder.leaves / "server-3").write_text(f"{os.getpid() + 1}\n")  # of an earlier process
        left = asyncio.create_task(
            leave_in_order(stop, Door(APP), busy=lambda: False, publish_s=5.0, run_folder=folder, index=3)
        )
        await asyncio.sleep(1.5)
        assert not stop.leaving.is_set()
        (folder.leaves / "server-3").write_text(f"{os.getpid()}\n")
        await stop.leaving.wait()
        stop.dismissed.set()
        await left

    asyncio.run(leave_now())
    assert stop.event.is_set()
    assert read_endpoint(folder, "server", 3) is None


def test_the_endpoint_of_a_later_session_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    publish_endpoint(folder, "server", 3, {"data": 1, "admin": 2})
    withdraw(folder, 3, os.getpid() + 1)
    assert read_endpoint(folder, "server", 3) is not None
    withdraw(folder, 3, os.getpid())
    assert read_endpoint(folder, "server", 3) is None
    withdraw(folder, 3, os.getpid())

"""Malformed, oversized, repeated and foreign requests over all routes of a real service, of two tenants at once:
every answer is typed, no tenant learns of the other, and the process is as it was.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from areal_lora.run_folder.paths import read_desired
from tests.support.clocks import wait_until
from tests.support.service.hostile import BODY_KIB, PASS_KIB, Shot, typed
from tests.support.sizes import size
from tests.support.tinker.hostile import posted, shot
from tests.support.tinker.scripted import PROGRAMS, ScriptedRun
from tests.support.tinker.sdk import VERSIONS, environment, sdk_program
from tests.support.tinker.tenant_world import API, PROTOBUF, World, check, settle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS, WARM, WORKERS = size(2000, 5000), size(500, 1000), 6
RAW_EVERY = 25
MORE_RSS = 48 << 20
MORE_FILES = 4
QUOTA = {"adapters": 4, "rank": 8, "body_kib": BODY_KIB, "pass_kib": PASS_KIB, "queued": 64, "queued_mib": 16}
VARIED = {200, 401, 404, 405, 410, 413, 422, 429}
WORDS = {"acme": ("acmesownword", "acmesecretword"), "bolt": ("boltsownword", "boltsecretword")}


@dataclass(slots=True)
class Storm:
    """``heard`` are all answers: method, path, status, type, body. ``used`` is what the process had, then and later."""

    heard: list[tuple[str, str, int, str, bytes]] = field(default_factory=list)
    used: list[dict[str, int]] = field(default_factory=list)
    cut: int = 0

    def statuses(self) -> Counter[int]:
        return Counter(status for _, _, status, _, _ in self.heard)


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"AREAL_LORA_SEED={seed}")
    with ScriptedRun(tmp_path_factory.mktemp("a run"), limits=QUOTA) as run:
        worlds = [settle(run, tenant, *words) for tenant, words in WORDS.items()]
        before = [each for each in read_desired(run.folder).adapters if any(w.mark in each.key for w in worlds)]
        process, found = psutil.Process(run.process.pid), Storm()
        for n, begin in ((WARM, 0), (REQUESTS - WARM, WORKERS)):
            asyncio.run(attack(run, worlds, n, [random.Random(seed + begin + k) for k in range(WORKERS)], found))
            assert run.process.poll() is None, run.log()
            wait_until(lambda: not process.net_connections("tcp")[8:], what="closed connections")
            found.used.append(
                {"files": process.num_fds(), "threads": process.num_threads(), "rss": process.memory_info().rss}
            )
        # Which quotas are exceeded depends on their order, and only one request in 900 has a 410.
        for more in range(2, 42):
            if found.statuses().keys() >= VARIED:
                break
            draws = [random.Random(seed + more * WORKERS + k) for k in range(WORKERS)]
            asyncio.run(attack(run, worlds, WARM // 2, draws, found))
        for world in worlds:
            check(run, world)
            samples = [content for name, content in world.answers.items() if ":sample:" in name]
            found.heard += [("POST", f"{API}/retrieve_future", 200, PROTOBUF["Content-Type"], each) for each in samples]
        there = {adapter.key: adapter for adapter in read_desired(run.folder).adapters}
        assert all(there.get(adapter.key) == adapter for adapter in before), "no one changed what is another's"
        assert "Traceback" not in run.log(), run.log()
        yield found


async def attack(run: ScriptedRun, worlds: list[World], n: int, draws: list[random.Random], found: Storm) -> None:
    left = n
    folder = str(run.folder.path)

    async def worker(http: httpx.AsyncClient, draw: random.Random) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            me, foe = draw.sample(worlds, 2)
            if left % RAW_EVERY == 0:
                await raw(run.url, draw, me, found)
                continue
            sent = shot(draw, me, foe)
            answer = await asked(http, sent)
            judge(sent, answer, me, foe, folder)
            found.heard.append(row(sent, answer))
            if answer.status_code == 200 and f'"request_id":"{me.session}:train:' in answer.text:
                name = answer.json()["request_id"]
                if name.startswith(f"{me.model}:") and name.rpartition(":")[2].isdecimal():
                    me.seq = max(me.seq, int(name.rpartition(":")[2]))
                left -= 1
                fetch = posted("retrieve_future", {"request_id": name}, me, statuses=frozenset({200}))
                answer = await asked(http, fetch)
                judge(replace(fetch, content=fetch.content + sent.content), answer, me, foe, folder)
                found.heard.append(row(fetch, answer))

    limits = httpx.Limits(max_connections=2 * WORKERS)
    async with httpx.AsyncClient(base_url=run.url, timeout=150.0, limits=limits) as http, asyncio.TaskGroup() as group:
        for draw in draws:
            group.create_task(worker(http, draw))


async def asked(http: httpx.AsyncClient, sent: Shot) -> httpx.Response:
    return await http.request(sent.method, sent.path, headers=sent.headers, content=sent.content)


def row(sent: Shot, answer: httpx.Response) -> tuple[str, str, int, str, bytes]:
    kind = answer.headers.get("content-type", "")
    return sent.method, urlsplit(sent.path).path, answer.status_code, kind, answer.content


def judge(sent: Shot, answer: httpx.Response, me: World, foe: World, folder: str) -> None:
    said = f"{sent.method} {sent.path[:300]} {sent.content[:300]!r}: {answer.status_code} {answer.text[:2000]}"
    assert answer.status_code in sent.statuses, said
    assert sent.answer in (None, answer.content), said
    assert foe.secret.encode() not in answer.content, said
    # The reason of a failed window quotes an earlier request of the tenant's own.
    earlier = answer.content.startswith(b'{"error":"its window has failed: ')
    for word in (foe.key,) if earlier else (foe.mark, foe.session, foe.key):
        assert word.encode() not in answer.content or word.encode() in sent.sent, said
    assert folder not in answer.text, said
    typed(answer.status_code, answer.headers.get("content-type", ""), answer.content, said)


async def raw(url: str, draw: random.Random, me: World, found: Storm) -> None:
    """A connection that is cut, slow, or says of itself what is wrong; none has an answer but a typed one."""
    found.cut += 1
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"session_id": me.session}).encode()

    def head(length: str) -> bytes:
        lines = ("POST /api/v1/session_heartbeat HTTP/1.1", "Host: x", f"X-API-Key: {me.key}", length, "", "")
        return "\r\n".join(lines).encode()

    whole = head(f"Content-Length: {len(body)}") + body
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        match draw.randrange(7):
            case 0:  # cut anywhere
                writer.write(whole[: draw.randrange(len(whole))])
            case 1:  # less than announced
                writer.write(head("Content-Length: 30000") + body)
                await asyncio.sleep(0.02)
            case 2:  # reset
                writer.write(whole)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case 3:  # no HTTP: closed with 400
                writer.write(draw.randbytes(200) + b"\r\n\r\n")
                assert (await reader.read(12)) in (b"", b"HTTP/1.1 400")
            case 4:  # more than may be, without an announcement
                writer.write(head("Transfer-Encoding: chunked"))
                for _ in range(BODY_KIB // 8 + 1):
                    writer.write(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
                await answered(reader, 413, found)
            case 5:  # announced as more than may be
                writer.write(head(f"Content-Length: {draw.choice(['99999999999999999999', '1000000'])}"))
                await answered(reader, None, found)
            case _:  # byte for byte
                for at in range(0, len(whole), 8):
                    writer.write(whole[at : at + 8])
                    await writer.drain()
                    await asyncio.sleep(0.001)
                await answered(reader, 200, found)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def answered(reader: asyncio.StreamReader, status: int | None, found: Storm) -> None:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 150.0)).decode()
    said = int(head.split()[1])
    if said == 400 and status is None:
        return  # a length that is no number of HTTP
    assert said == (status or 413), head
    length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
    assert length is not None
    body = await reader.readexactly(int(length[1]))
    typed(said, "application/json", body, head)
    found.heard.append(("POST", f"{API}/session_heartbeat", said, "application/json", body))


# ---------------------------------------------------------------- what must hold


def test_every_answer_is_typed_and_nothing_leaks(storm: Storm) -> None:
    """The fixture judges each answer as it comes."""
    assert len(storm.heard) + storm.cut >= REQUESTS
    seen = storm.statuses()
    print(dict(sorted(seen.items())), f"and {storm.cut} broken connections")
    assert seen.keys() >= VARIED, "the storm is as varied as it says"
    assert seen[200] > REQUESTS // 10, "a part of it reaches what is behind the checks"
    tried = {path for _, path, _, _, _ in storm.heard}
    assert len({path for path in tried if path.startswith(API)}) > 60


def test_the_process_is_as_it_was(storm: Storm) -> None:
    before, after = storm.used
    print(before, after)
    assert after["files"] <= before["files"] + MORE_FILES
    assert after["threads"] <= before["threads"] + (os.cpu_count() or 1) + 4, "those of one pool at most"
    assert after["rss"] <= before["rss"] + MORE_RSS


def test_half_sent_bodies_of_a_tenant_are_bounded_and_others_are_served(tmp_path: Path) -> None:
    n, mib = 80, 1 << 20
    with ScriptedRun(tmp_path / "a run", limits={"pass_kib": 1024, "queued_mib": 4}) as run:
        keys = {tenant: {"X-API-Key": run.tenant(tenant)} for tenant in WORDS}
        host, port = run.url.removeprefix("http://").split(":")
        process = psutil.Process(run.process.pid)
        lines = (f"POST {API}/asample HTTP/1.1", "Host: x", f"X-API-Key: {keys['acme']['X-API-Key']}")
        heads, writers = list[bytes](), list[asyncio.StreamWriter]()

        async def half(length: str, body: bytes) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write("\r\n".join((*lines, length, "", "")).encode() + body)
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # at the end, by this test itself
                heads.append(await reader.readuntil(b"\r\n\r\n"))

        async def attack() -> None:
            before, tasks = process.memory_info().rss, set[asyncio.Task[None]]()
            for k in range(n):
                chunked = k % 2
                length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {mib}"
                tasks.add(asyncio.create_task(half(length, b"80000\r\n" * chunked + b" " * (mib // 2))))
            async with asyncio.timeout(150.0):
                while len(heads) < n - 4:
                    await asyncio.sleep(0.02)
            assert all(b" 429 " in head and b"retry-after: 1\r\n" in head.lower() for head in heads)
            assert process.memory_info().rss < before + 16 * mib
            async with httpx.AsyncClient(base_url=run.url, timeout=150.0) as http:

                async def opened(tenant: str) -> int:
                    body = {"sdk_version": "0"}
                    return (await http.post(f"{API}/create_session", json=body, headers=keys[tenant])).status_code

                assert [await opened(tenant) for tenant in WORDS] == [429, 200]
                for writer in writers:
                    writer.close()
                await asyncio.wait(tasks)
                async with asyncio.timeout(150.0):
                    while (status := await opened("acme")) == 429:
                        await asyncio.sleep(0.02)
                assert status == 200

        asyncio.run(attack())


@pytest.mark.parametrize("version", VERSIONS)
def test_both_sdks_read_every_answer(storm: Storm, version: str) -> None:
    """With its own classes: an answer as its type, a failure as the error that it raises, with path and reason."""
    rows: list[list[Any]] = [
        [method, path, status, kind, base64.b64encode(content).decode()]
        for method, path, status, kind, content in storm.heard
        if path.startswith(API)
    ]
    done = subprocess.run(
        sdk_program(PROGRAMS / "read_answers.py"),
        input=json.dumps(rows),
        env=environment(version),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["wrong"] == []
    assert sum(said["read"].values()) == len(rows)
    print(said["read"])
    for name in (
        "NotFoundError",
        "AuthenticationError",
        "UnprocessableEntityError",
        "RateLimitError",
        "APIStatusError",
    ):
        assert said["read"][name] > 0
    for name in ("UntypedAPIFuture", "RequestFailedResponse", "SampleResponse", "ForwardBackwardOutput"):
        assert said["read"][name] > 0

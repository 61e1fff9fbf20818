"""Samples at the service: what is kept of them and for how long, and what tenants may have in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from areal_lora.errors import RequestError, Unavailable
from areal_lora.service.gateway import n_tokens
from areal_lora.service.queue.client_sessions import kept_samples
from areal_lora.service.queue.queue_rows import SavedState
from areal_lora.service.queue.requests import Pending
from areal_lora.service.tinker import sample_tasks, sdk_bodies
from areal_lora.service.tinker.checkpoints import Exports
from areal_lora.service.tinker.sample_tasks import Sampling
from tests.support.service.running import Running, data_plane, running, service_config

N_TOKENS = 512


class Scene:
    """A session of the base with a server that answers, or keeps, every sample."""

    def __init__(self, it: Running) -> None:
        self.it, self.n, self.tenant = it, 0, "acme"
        self.answers = asyncio.Event()
        self.answers.set()
        self.status = 200
        self.faults = 0
        self.seeds: list[int | None] = []

    async def reply(self, body: dict[str, Any]) -> web.StreamResponse:
        await self.answers.wait()
        self.seeds.append(body["seed"])
        if self.faults:
            self.faults -= 1
            return web.Response(status=500)
        n = body["max_tokens"]
        choice = {"finish_reason": "length", "token_ids": [5] * n, "logprobs": {"token_logprobs": [-1.0] * n}}
        choices = [choice | {"index": k} for k in range(body["n"])]
        return web.json_response({"model": "base", "choices": choices}, status=self.status)

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.it.call(self.tenant, "POST", f"/api/v1/{path}", json=body)

    async def begin(self) -> None:
        session = (await self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "1"})).json()
        body = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "tiny_model"}
        self.sampler = (await self.post("create_sampling_session", body)).json()["sampling_session_id"]

    async def sample(self, n: int = 16, max_tokens: int = 32, seed: int | None = None) -> httpx.Response:
        self.n += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
        return await self.post(
            "asample",
            {
                "sampling_session_id": self.sampler,
                "seq_id": self.n,
                "num_samples": n,
                "prompt": prompt,
                "sampling_params": {"max_tokens": max_tokens, "seed": seed},
            },
        )

    async def fetch(self, name: str) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": name})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not condition():
            await asyncio.sleep(0.02)


def play(tmp_path: Path, scene: Callable[[Scene], Awaitable[None]], **quota: int) -> None:
    async def run() -> None:
        async with running(service_config(tmp_path), **quota) as it:
            one = Scene(it)
            async with data_plane(it, 0, one.reply):
                await one.begin()
                await scene(one)

    asyncio.run(run())


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The samples of ``acme`` that the service has."""
    found = sample_tasks._Samples()
    plain = Sampling.__init__

    def init(self: Sampling, *parts: Any) -> None:
        plain(self, *parts)
        self._samples["acme"] = found

    monkeypatch.setattr(Sampling, "__init__", init)
    return found


def test_an_answer_is_kept_for_a_while_after_its_fetch(
    tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(it: Scene) -> None:
        names = [(await it.sample()).json()["request_id"] for _ in range(5)]
        first = [(await it.fetch(name)).content for name in names]
        assert [(await it.fetch(name)).content for name in names] == first, "the SDK may repeat a fetch"
        monkeypatch.setattr(sample_tasks, "GRACE_S", 0.05)
        names.append((await it.sample()).json()["request_id"])
        await it.fetch(names[-1])
        await until(lambda: names[-1] not in kept)
        assert (await it.fetch(names[-1])).status_code == 410
        assert set(kept) == set(names[:-1])

    play(tmp_path, scene)


def test_an_answer_that_no_client_fetches_leaves(
    tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_tasks, "UNFETCHED_S", 0.2)

    async def scene(it: Scene) -> None:
        await it.sample()
        await until(lambda: kept == {})

    play(tmp_path, scene)


@pytest.mark.parametrize(("kept_mib", "queued_mib"), [(256, 1), (1, 256)])
def test_answers_count_as_bytes_of_the_tenant(
    kept_mib: int, queued_mib: int, tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """131 kB each, of requests of 200 bytes; fetched ones make room, others are refused."""
    monkeypatch.setattr(sample_tasks, "KEPT_MIB", kept_mib)

    async def scene(it: Scene) -> None:
        for _ in range(20):
            assert (await it.fetch((await it.sample(64, 250)).json()["request_id"])).status_code == 200
        assert sum(len(sample.found) for sample in kept.values()) <= 1.2 * (1 << 20), "one answer may come on top"
        statuses = set()
        for _ in range(10):
            refused = await it.sample(64, 250)
            statuses.add(refused.status_code)
            await asyncio.gather(*(sample.task for sample in kept.values()))
        assert statuses == {200, 429}
        assert refused.headers["Retry-After"] == "1"
        assert sum(len(sample.found) for sample in kept.values()) <= 1.2 * (1 << 20)

    play(tmp_path, scene, queued_mib=queued_mib)


def test_a_sample_costs_nothing_for_those_of_other_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[str]()

    class Watched(sample_tasks._Sample):
        def __getattribute__(self, name: str) -> Any:
            looked_at.append(object.__getattribute__(self, "tenant"))
            return object.__getattribute__(self, name)

    monkeypatch.setattr(sample_tasks, "_Sample", Watched)

    async def scene(it: Scene) -> None:
        for _ in range(8):
            assert (await it.fetch((await it.sample()).json()["request_id"])).status_code == 200
        it.tenant = "bolt"
        await it.begin()
        looked_at.clear()
        assert (await it.fetch((await it.sample()).json()["request_id"])).status_code == 200
        assert set(looked_at) == {"bolt"}

    play(tmp_path, scene)


def test_a_sample_costs_as_much_however_many_are_kept(
    tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each one takes the place of an older one."""
    looked_at = set[int]()

    class Watched(sample_tasks._Sample):
        def __getattribute__(self, name: str) -> Any:
            looked_at.add(id(self))
            return object.__getattribute__(self, name)

    monkeypatch.setattr(sample_tasks, "_Sample", Watched)

    async def scene(it: Scene) -> None:
        for _ in range(20):
            looked_at.clear()
            assert (await it.fetch((await it.sample()).json()["request_id"])).status_code == 200
            assert len(looked_at) <= 2
        assert len(kept) == 12

    play(tmp_path, scene, queued=3)


def test_tokens_in_progress_are_a_quota(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.answers.clear()
        taken = await it.sample(8, 100)
        refused = await it.sample(8, 100)
        assert (taken.status_code, refused.status_code, refused.headers["Retry-After"]) == (200, 429, "1")
        never = await it.sample(16, 100)
        assert (never.status_code, never.json()["error"]["path"]) == (422, "tokens")
        it.answers.set()
        assert (await it.fetch(taken.json()["request_id"])).status_code == 200
        assert (await it.sample(8, 100)).status_code == 200

    play(tmp_path, scene, tokens=1000)


def test_failed_samples_are_bounded_and_leave_the_file(
    tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the client fetches them or not; a request counts for as long as the file has it."""
    monkeypatch.setattr(sample_tasks, "UNFETCHED_S", 3600.0)

    async def scene(it: Scene) -> None:
        it.status = 400
        statuses = []
        for _ in range(12):
            taken = await it.sample()
            statuses.append(taken.status_code)
            if taken.status_code == 200:
                await kept[taken.json()["request_id"]].task
        assert statuses == [200] * 8 + [429] * 4, "as many as four times the quota of those in progress"
        await it.it.queue.keep()
        assert await it.it.queue.change(kept_samples) == []

    play(tmp_path, scene, queued=2)


def test_a_passing_fault_of_the_file_fails_no_sample(
    tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(it: Scene) -> None:
        serve, faults = it.it.queue.serve, [Unavailable(503, "database is locked")] * 2

        async def locked(*parts: Any) -> Any:
            if faults:
                raise faults.pop()
            return await serve(*parts)

        monkeypatch.setattr(it.it.queue, "serve", locked)
        assert (await it.fetch((await it.sample()).json()["request_id"])).status_code == 200
        assert not faults

    play(tmp_path, scene)


def test_a_sample_waits_for_a_place_not_for_ever(
    tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any other reason it waits on."""
    monkeypatch.setattr(sample_tasks, "PATIENCE_S", 0.04)
    monkeypatch.setattr(sample_tasks, "PAUSE_S", 0.01)

    async def scene(it: Scene) -> None:
        found = [Pending(reason="it is paused")] * 9 + [Pending(reason="no place", capacity=True)] * 99

        async def serve(*parts: Any) -> Pending:
            return found.pop(0)

        monkeypatch.setattr(it.it.queue, "serve", serve)
        failed = (await it.fetch((await it.sample()).json()["request_id"])).json()
        assert (failed["category"], "no place" in failed["error"]) == ("server", True)
        assert len(found) == 99 - 5

    play(tmp_path, scene)


@pytest.mark.parametrize("failures", [1, 2])
def test_tokens_count_until_their_end_once(
    tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """The same request comes twice while the file of the service is full."""

    async def scene(it: Scene) -> None:
        keep_sample, full = it.it.queue.keep_sample, [Unavailable(507, "the disk is full")] * failures

        async def keep(*parts: Any) -> None:
            await asyncio.sleep(0.05)
            if full:
                raise full.pop()
            await keep_sample(*parts)

        monkeypatch.setattr(it.it.queue, "keep_sample", keep)
        first = asyncio.create_task(it.sample())
        await asyncio.sleep(0)
        it.n -= 1
        second = await it.sample()
        assert sorted([(await first).status_code, second.status_code]) == [[200, 507], [507, 507]][failures - 1]
        await asyncio.gather(*(sample.task for sample in kept.values()))
        assert it.it.api.meter._tokens == {}
        mine = it.it.api.sdk._sampling._samples["acme"]
        assert (len(mine), mine.in_progress, mine.n_bytes > 0) == (2 - failures, 0, failures == 1)
        if mine:
            assert (await it.fetch(next(iter(mine)))).status_code == 200

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [1, 2, 3], "max_tokens": 7}, 10),
        ({"prompt": [[1, 2], [3]], "max_tokens": 0}, 3),
        ({"prompt": "four", "max_tokens": 6, "n": 2}, 20),
        ({"prompt": "x" * 500, "max_tokens": 1}, 101),
        ({"messages": [], "max_tokens": 0, "n": 5}, 510),
        ({"messages": ["x" * 500], "max_tokens": 1}, 101),
        ({"messages": [], "max_tokens": 8, "logprobs": True, "top_logprobs": 3}, 40),
    ],
)
def test_tokens_of_a_request(body: dict[str, Any], tokens: int) -> None:
    assert n_tokens(body, context=100) == tokens


@pytest.mark.parametrize("prompt", [["a", 6], [[1], 2], ["a", [1]]])
def test_a_prompt_that_mixes_texts_and_tokens_is_refused(prompt: list[Any]) -> None:
    with pytest.raises(RequestError, match="prompt mixes texts"):
        n_tokens({"prompt": prompt}, context=100)


def test_one_tenants_downloads_do_not_end_anothers() -> None:
    exports, state = Exports(), SavedState.__new__(SavedState)
    exports.start("bolt", "s", 0, state)
    for k in range(200):
        exports.start("acme", "s", k, state)
    assert exports.state("bolt", "s:train:0") is state
    assert exports.state("acme", "s:train:0") is None
    assert exports.state("acme", "s:train:199") is state


def test_a_sample_is_read_once_and_its_tokens_are_those_of_its_body(
    tmp_path: Path, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[sdk_bodies.SampleRequest] = []
    plain = sdk_bodies.read_sample

    def noted(body: bytes) -> sdk_bodies.SampleRequest:
        read.append(plain(body))
        return read[-1]

    monkeypatch.setattr(sdk_bodies, "read_sample", noted)

    async def scene(it: Scene) -> None:
        it.answers.clear()
        name = (await it.sample(3, 20)).json()["request_id"]
        made = sdk_bodies.completion(read[0], "base", 64, pinned=False)
        assert kept[name].tokens == n_tokens(made, context=64) == 3 * 22
        it.answers.set()
        assert (await it.fetch(name)).status_code == 200
        assert len(read) == 1

    play(tmp_path, scene)


def test_a_kept_sample_that_is_no_longer_accepted_fails_at_the_start(tmp_path: Path, kept: dict[str, Any]) -> None:
    async def scene(it: Scene) -> None:
        name = f"{it.sampler}:7"
        await it.it.queue.keep_sample("acme", it.sampler, name, "mark", b'{"seq_id":7}')
        await it.it.api.sdk._sampling.start()
        failed = (await it.fetch(name)).json()
        assert (failed["category"], "sampling_session_id" in failed["error"]) == ("user", True)
        assert it.it.api.meter._tokens == {}

    play(tmp_path, scene)


def test_a_sample_whose_server_fails_is_sampled_again_twice(tmp_path: Path, kept: dict[str, Any]) -> None:
    async def scene(it: Scene) -> None:
        it.faults = 2
        taken = (await it.sample(seed=7)).json()["request_id"]
        assert (await it.fetch(taken)).headers["Content-Type"] == sdk_bodies.PROTOBUF
        assert (it.seeds, it.faults) == ([7] * 3, 0)
        it.faults = 9
        name = (await it.sample()).json()["request_id"]
        failed = (await it.fetch(name)).json()
        assert (failed["category"], it.faults) == ("server", 6)
        assert "failed during this request" in failed["error"]
        await it.it.queue.keep()
        assert await it.it.queue.change(kept_samples) == []

    play(tmp_path, scene)

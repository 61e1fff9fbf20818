"""The API over its real ASGI app, file, checks and writer."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from aiohttp import web
from safetensors.numpy import load

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.checkpoint.recover import Version
from areal_lora.network.http_server import HttpServer, listening
from areal_lora.run_folder.paths import read_desired, write_desired
from areal_lora.run_folder.rendezvous import publish_endpoint
from areal_lora.service import acceptance, http
from areal_lora.service.queue import queue_writer
from areal_lora.service.queue.queue_rows import Quota
from tests.support.checkpoint import trained_run
from tests.support.clocks import Clock
from tests.support.service.hostile import ErrorBody
from tests.support.service.running import Running, data_plane, running, section, service_config

Scene = Callable[[Running], Awaitable[None]]


def play(tmp_path: Path, scene: Scene, limits: Mapping[str, float] = MappingProxyType({}), **service: Any) -> None:
    """Run ``scene`` with a service in ``tmp_path``, which has a space in its name."""

    async def run() -> None:
        async with running(service_config(tmp_path / "the runs", **service), **limits) as it:
            await scene(it)

    asyncio.run(run())


def desired(it: Running) -> dict[str, str]:
    return {adapter.key: adapter.phase.value for adapter in read_desired(it.folder).adapters}


def refused(response: Any, status: int, path: str = "") -> None:
    assert response.status_code == status, response.text
    error = msgspec.json.decode(response.content, type=ErrorBody).error
    assert error.reason
    assert path in ("", error.path)


def test_an_adapter_is_created_paused_resumed_and_deleted(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        created = await it.call("acme", "POST", "/v1/adapters", json=section())
        assert (created.status_code, created.json()["incarnation"]) == (201, 1)
        assert desired(it) == {"acme-sums.1": "active"}, "the run can read it when the answer comes"
        it.record("state", "acme-sums.1", state="active", version=0)
        for verb, wanted in (("pause", "paused"), ("pause", "paused"), ("resume", "active")):
            changed = await it.call("acme", "POST", f"/v1/adapters/sums/{verb}")
            assert (changed.status_code, changed.json()["wanted"]) == (200, wanted)
            assert desired(it) == {"acme-sums.1": wanted}
        assert (await it.call("acme", "DELETE", "/v1/adapters/sums")).status_code == 200
        assert desired(it) == {}
        refused(await it.call("acme", "GET", "/v1/adapters/sums"), 404)
        again = await it.call("acme", "POST", "/v1/adapters", json=section())
        assert again.json()["incarnation"] == 2
        shown = (await it.call("acme", "GET", "/v1/adapters/sums")).json()
        assert (shown["phase"], shown["step"]) == (None, 0), "nothing of its former bearer"

    play(tmp_path, scene)


def test_settings_are_those_of_a_start_and_are_refused_like_there(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        for changes, path in (
            ({"rankk": 3}, "rankk"),
            ({"rank": 0}, "rank"),
            ({"rank": 16}, "rank"),
            ({"target_modules": ["nope"]}, "target_modules"),
            ({"algorithm": {"kind": "nope"}}, "algorithm.kind"),
            ({"sampling": {"prompts_per_step": 1, "n_samples": 1, "max_new_tokens": 4}}, "sampling.n_samples"),
            ({"max_staleness": 9}, "max_staleness"),
            ({"name": "A"}, "name"),
            ({"name": None}, "name"),
        ):
            refused(await it.call("acme", "POST", "/v1/adapters", json=section(**changes)), 422, path)
        assert desired(it) == {}

    play(tmp_path, scene)


def test_tenants_see_nothing_of_each_other(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        for tenant, steps in (("acme", 3), ("bolt", 5)):
            assert (await it.call(tenant, "POST", "/v1/adapters", json=section(steps=steps))).status_code == 201
        assert desired(it) == {"acme-sums.1": "active", "bolt-sums.1": "active"}
        assert (await it.call("acme", "POST", "/v1/adapters", json=section(name="xyz"))).status_code == 201
        for method, path in (
            ("GET", "xyz"),
            ("DELETE", "xyz"),
            ("POST", "xyz/pause"),
            ("POST", "xyz/resume"),
            ("GET", "xyz/logs"),
            ("GET", "xyz/metrics"),
            ("GET", "xyz/download"),
        ):
            there = await it.call("bolt", method, f"/v1/adapters/{path}")
            never = await it.call("bolt", method, f"/v1/adapters/{path.replace('xyz', 'not')}")
            refused(there, 404)
            assert there.text.replace("xyz", "not") == never.text, "that it exists is not said"
        refused(await it.call("bolt", "POST", "/v1/completions", json={"model": "xyz", "prompt": "a"}), 404, "model")
        listed = (await it.call("bolt", "GET", "/v1/adapters")).json()["adapters"]
        assert [(a["name"], a["settings"]["steps"]) for a in listed] == [("sums", 5)]
        it.record("state", "acme-sums.1", state="failed", version=1, reason="acme's own fault")
        assert (await it.call("bolt", "GET", "/v1/adapters/sums/logs")).json() == {"states": []}
        mine = (await it.call("acme", "GET", "/v1/adapters/sums/logs")).json()["states"]
        assert [(record["state"], record["reason"]) for record in mine] == [("failed", "acme's own fault")]
        assert "adapter" not in mine[0]

    play(tmp_path, scene)


def test_a_repeated_request_has_the_first_answer_and_another_one_is_refused(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        headers = {"Idempotency-Key": "one"}
        first = await it.call("acme", "POST", "/v1/adapters", json=section(), headers=headers)
        assert (await it.call("acme", "DELETE", "/v1/adapters/sums")).status_code == 200
        second = await it.call("acme", "POST", "/v1/adapters", json=section(), headers=headers)
        assert (second.status_code, second.content) == (first.status_code, first.content)
        assert desired(it) == {}, "nothing was created twice"
        refused(await it.call("acme", "POST", "/v1/adapters", json=section(rank=2), headers=headers), 422)
        refused(await it.call("acme", "DELETE", "/v1/adapters/sums", headers=headers), 422, "Idempotency-Key")
        other = await it.call("bolt", "POST", "/v1/adapters", json=section(rank=2), headers=headers)
        assert other.status_code == 201, "keys are of one tenant"
        for key in ("", "x" * 129, "a\tb"):
            with_key = {"Idempotency-Key": key}
            refused(await it.call("acme", "POST", "/v1/adapters/x/pause", headers=with_key), 422, "Idempotency-Key")

    play(tmp_path, scene)


def test_the_app_starts_again_with_what_was_acknowledged(tmp_path: Path) -> None:
    config = service_config(tmp_path / "the runs")

    async def run() -> None:
        async with running(config) as it:
            await it.call("acme", "POST", "/v1/adapters", json=section(), headers={"Idempotency-Key": "one"})
            await it.call("acme", "POST", "/v1/adapters/sums/pause")
            operator = it.keys["operator"]
        for lost in (False, True):
            if lost:
                it.folder.desired.unlink()
            async with running(config) as it:
                assert desired(it) == {"acme-sums.1": "paused"}
                shown = (await it.call("acme", "GET", "/v1/adapters/sums")).json()
                assert shown["wanted"] == "paused"
                assert it.keys["operator"] == operator
                again = await it.call(
                    "acme", "POST", "/v1/adapters", json=section(), headers={"Idempotency-Key": "one"}
                )
                assert (again.status_code, again.json()["incarnation"]) == (201, 1)

    asyncio.run(run())


def test_quotas_of_adapters_bodies_and_operations(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        quota = {"tenant": "acme", "quota": {"adapters": 1, "operations": 3, "body_kib": 1}}
        assert (await it.call("operator", "POST", "/v1/tenants", json=quota)).status_code == 201
        refused(await it.call("acme", "POST", "/v1/adapters", content=b"{" + b" " * 1024), 413, "body")

        async def parts() -> Any:
            for _ in range(20):
                yield b" " * 100

        refused(await it.call("acme", "POST", "/v1/adapters", content=parts()), 413, "body")
        small = {"task": {"kind": "word_problems", "n_train": 8, "n_eval": 2}}
        assert (await it.call("acme", "POST", "/v1/adapters", json=section(**small))).status_code == 201
        refused(await it.call("acme", "POST", "/v1/adapters", json=section(name="two", **small)), 429, "name")
        for verb in ("pause", "resume"):
            assert (await it.call("acme", "POST", f"/v1/adapters/sums/{verb}")).status_code == 200
        refused(await it.call("acme", "POST", "/v1/adapters/sums/pause"), 429, "operations")
        it.record("state", "acme-sums.1", state="active", version=0)
        await it.writer.settle()
        assert (await it.call("acme", "POST", "/v1/adapters/sums/pause")).status_code == 200

    play(tmp_path, scene)


def test_the_operator_makes_tenants_and_keys_and_others_do_not(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        made = await it.call("operator", "POST", "/v1/tenants", json={"tenant": "new", "quota": {"rank": 4}})
        assert (made.status_code, made.json()["quota"]["rank"]) == (201, 4)
        key = (await it.call("operator", "POST", "/v1/tenants/new/keys", json={"label": "laptop"})).json()["key"]
        it.keys["new"] = key
        assert (await it.call("new", "GET", "/v1/adapters")).json() == {"adapters": []}
        refused(await it.call("new", "POST", "/v1/adapters", json=section(rank=8)), 422, "rank")
        replaced = (await it.call("operator", "POST", "/v1/tenants/new/keys", json={"label": "laptop"})).json()["key"]
        refused(await it.call("new", "GET", "/v1/adapters"), 401)
        it.keys["new"] = replaced
        assert (await it.call("operator", "DELETE", "/v1/tenants/new/keys/laptop")).status_code == 200
        refused(await it.call("new", "GET", "/v1/adapters"), 401)
        for method, path in (
            ("GET", "/v1/tenants"),
            ("POST", "/v1/tenants"),
            ("POST", "/v1/tenants/acme/keys"),
            ("DELETE", "/v1/tenants/bolt/keys/test"),
        ):
            refused(await it.call("acme", method, path, json={"tenant": "acme"}), 404)
        refused(await it.call("operator", "DELETE", "/v1/tenants/local/keys/operator"), 404)
        refused(await it.call("operator", "POST", "/v1/tenants/nobody/keys"), 404)
        for quota in ({"rank": 0}, {"rank": 1.5}, {"nope": 1}, {"weight": -1}):
            refused(await it.call("operator", "POST", "/v1/tenants", json={"tenant": "new", "quota": quota}), 422)
        refused(await it.call("operator", "POST", "/v1/tenants", json={"tenant": "a-b"}), 422, "tenant")
        assert it.writer.tables.quotas["acme"] == it.writer.tables.quotas["bolt"]
        assert isinstance(it.writer.tables.quotas["new"], Quota)

    play(tmp_path, scene)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer tml-", "Basic x", "tml-0", "Bearer \xff"])
def test_without_a_valid_key_nothing_is_answered(header: str | None, tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        for method, path in (("GET", "/v1/adapters"), ("POST", "/v1/adapters"), ("GET", "/v1/tenants")):
            refused(await it.http.request(method, path, headers=headers), 401, "Authorization")

    play(tmp_path, scene)


def test_integers_beyond_64_bits_are_refused(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        for n in (2**63, 10**24):
            refused(await it.call("acme", "POST", "/v1/adapters", json=section(seed=n)), 422)
        quota = {"tenant": "t", "quota": {"rank": 10**24}}
        refused(await it.call("operator", "POST", "/v1/tenants", json=quota), 422)
        session = (await it.call("acme", "POST", "/api/v1/create_session", json={})).json()["session_id"]
        wanted = {"session_id": session, "model_seq_id": 0, "base_model": "tiny_model"}
        for lora in ({"rank": 8, "seed": 10**24}, {"rank": 10**24}):
            refused(await it.call("acme", "POST", "/api/v1/create_model", json=wanted | {"lora_config": lora}), 422)
        assert (await it.call("acme", "POST", "/v1/adapters", json=section(seed=2**63 - 1))).status_code == 201

    play(tmp_path, scene)


def test_an_unexpected_exception_is_one_callers_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the writer, where it is rolled back, and in a handler."""

    def fails(*_: object) -> None:
        raise OverflowError("it is too large")

    async def scene(it: Running) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(acceptance, "answered", fails)
            asked = {"json": section(), "headers": {"Idempotency-Key": "k"}}
            refused(await it.call("acme", "POST", "/v1/adapters", **asked), 500, "service")
        with monkeypatch.context() as patch:
            patch.setattr(it.observed, "of", fails)
            await it.call("acme", "POST", "/v1/adapters", json=section())
            refused(await it.call("acme", "GET", "/v1/adapters/sums/metrics"), 500, "service")
        assert (await it.call("bolt", "POST", "/v1/adapters", json=section())).status_code == 201
        with monkeypatch.context() as patch:
            patch.setattr(queue_writer, "read_desired", fails)  # after the commit: the run has to read what is durable
            refused(await it.call("bolt", "POST", "/v1/adapters", json=section(name="late")), 500, "service")
        assert "bolt-late.1" not in desired(it)
        await it.writer.settle()
        assert desired(it)["bolt-late.1"] == "active"

    play(tmp_path, scene)


def test_a_full_disk_refuses_until_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the service's file, then of the desired state, which is written after the commit: then later."""

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scene(it: Running) -> None:
        db = it.writer._store._db
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
        big = {
            "json": section(name="big", sampling=section()["sampling"] | {"stop": [f"{n:0256}" for n in range(64)]}),
            "headers": {"Idempotency-Key": "big"},
        }
        refused(await it.call("acme", "POST", "/v1/adapters", **big), 507, "service")
        await it.queue.keep()
        db.execute("PRAGMA max_page_count = 1073741823")
        with monkeypatch.context() as patch:
            patch.setattr(queue_writer, "write_desired", no_space)
            for _ in range(2):
                assert (await it.call("acme", "POST", "/v1/adapters", **big)).status_code == 201
            await it.writer.settle()
            assert not desired(it)
            assert (await it.call("acme", "POST", "/v1/adapters", json=section(name="plain"))).status_code == 201
        await it.writer.settle()
        assert desired(it) == {"acme-big.1": "active", "acme-plain.1": "active"}
        with monkeypatch.context() as patch:
            patch.setattr(queue_writer, "write_desired", lambda *parts: (write_desired(*parts), no_space()))
            assert (await it.call("bolt", "POST", "/v1/adapters", json=section())).status_code == 201
        await it.writer.settle()
        assert (await it.call("operator", "POST", "/v1/adapters", json=section())).status_code == 201
        assert (await it.call("acme", "POST", "/v1/adapters", **big)).status_code == 201

    play(tmp_path, scene)


def test_metrics_come_in_pages(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        await it.call("acme", "POST", "/v1/adapters", json=section())
        for step in range(7):
            it.record("step", "acme-sums.1", step=step, version=step, time_s=1.0, metrics={"train/reward_mean": 0.25})
        seen, after = [], 0
        while (page := (await it.call("acme", "GET", f"/v1/adapters/sums/metrics?after={after}&limit=3")).json())[
            "records"
        ]:
            seen += [record["step"] for record in page["records"]]
            after = page["next"]
        assert seen == list(range(7))
        shown = (await it.call("acme", "GET", "/v1/adapters/sums")).json()
        assert (shown["step"], shown["reward"]) == (7, 0.25)
        for query in ("after=-1", "after=x", "limit=1001", "after=1e3", "after=٣", "after=" + "9" * 4000):
            response = await it.call("acme", "GET", f"/v1/adapters/sums/metrics?{query}")
            assert response.status_code in (413, 422)

    play(tmp_path, scene)


def test_a_download_is_a_tar_of_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, _ = trained_run.make_run(tmp_path, "acme-sums.1")

    async def scene(it: Running) -> None:
        await it.call("acme", "POST", "/v1/adapters", json=section())
        refused(await it.call("acme", "GET", "/v1/adapters/sums/download"), 404, "version")
        trained.checkpoints.rename(it.folder.checkpoints)
        assert versions_in(it.folder.adapter_checkpoints("acme-sums.1")) == [1, 2, 3]
        answers = {
            v: await it.call("acme", "GET", f"/v1/adapters/sums/download?version={v}") for v in ("newest", "v1", "3")
        }
        assert [answer.status_code for answer in answers.values()] == [200, 200, 200], answers["newest"].text
        weights = {v: tensors(answer.content) for v, answer in answers.items()}
        assert weights["newest"].keys() == weights["v1"].keys()
        assert all((weights["newest"][name] == weights["3"][name]).all() for name in weights["3"])
        assert any((weights["newest"][name] != weights["v1"][name]).any() for name in weights["v1"])
        for version in ("9", "oldest", "../.."):
            refused(await it.call("acme", "GET", f"/v1/adapters/sums/download?version={version}"), 422, "version")
        assert not any(it.folder.service_exports.iterdir()), "nothing of it stays"

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Version, "export", full)
        refused(await it.call("acme", "GET", "/v1/adapters/sums/download"), 503, "version")

    play(tmp_path, scene)


def tensors(content: bytes) -> dict[str, Any]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert sorted(tar.getnames()) == ["sums/adapter_config.json", "sums/adapter_model.safetensors"]
        config, model = (
            tar.extractfile(f"sums/{name}") for name in ("adapter_config.json", "adapter_model.safetensors")
        )
        assert config is not None
        assert model is not None
        assert "acme" not in config.read().decode()
        return load(model.read())


def test_inference_has_the_tenants_name_outside_and_the_runs_name_inside(tmp_path: Path) -> None:
    async def reply(body: dict[str, Any]) -> web.Response:
        if body.get("stream"):
            line = b'data: {"model":"acme-sums.1@v3","choices":[{"text":"a"}]}\n\n'
            return web.Response(body=line * 2 + b"data: [DONE]\n\n", content_type="text/event-stream")
        if body.get("n") == 0:
            error = {"error": {"message": f"n is 0 for {body['model']}"}}
            return web.json_response(error, status=400)
        return web.json_response({"model": "acme-sums.1@v3", "choices": [{"text": "acme-sums.1 is no secret here"}]})

    async def scene(it: Running) -> None:
        await it.call("acme", "POST", "/v1/adapters", json=section())
        body = {"model": "sums", "prompt": "1 + 1 ="}
        refused(await it.call("acme", "POST", "/v1/completions", json=body), 503)

        async def missing(body: dict[str, Any]) -> web.Response:
            return web.Response(status=404)

        async with data_plane(it, 0, missing) as empty:
            refused(await it.call("acme", "POST", "/v1/completions", json=body), 404, "model")
            async with data_plane(it, 1, reply) as asked:
                answers = [
                    await it.call("acme", "POST", path, json=body | {"model": model})
                    for model in ("sums", "sums@v3")
                    for path in ("/v1/completions", "/v1/chat/completions")
                ]
                assert [a.json()["model"] for a in answers] == ["sums@v3"] * 4, "the server without it is passed over"
                assert [each["model"] for each in asked] == ["acme-sums.1"] * 2 + ["acme-sums.1@v3"] * 2
                assert len(empty) == 5
                stream = await it.call("acme", "POST", "/v1/completions", json=body | {"stream": True})
                assert stream.text.count('data: {"model":"sums@v3"') == 2
                assert stream.text.endswith("data: [DONE]\n\n")
                wrong = await it.call("acme", "POST", "/v1/completions", json=body | {"n": 0})
                refused(wrong, 422)
                assert wrong.json()["error"]["reason"] == "n is 0 for sums"
                refused(await it.call("acme", "POST", "/v1/completions", json=body | {"pin_version": True}), 422)
                for model in ("base", "acme-sums.1", "acme-sums", "bolt-sums.1", "sums@v", "", 3, None):
                    response = await it.call("acme", "POST", "/v1/completions", json=body | {"model": model})
                    assert response.status_code in (404, 422), model
                refused(await it.call("bolt", "POST", "/v1/completions", json=body), 404, "model")
                assert all(each["model"].startswith("acme-sums.1") for each in asked)
        it.record("publish", "acme-sums.1", version=0, total_ms=1.0)
        models = (await it.call("acme", "GET", "/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["sums"]
        assert (await it.call("bolt", "GET", "/v1/models")).json()["data"] == []

    play(tmp_path, scene)


def test_a_stream_passes_on_an_event_of_any_length(tmp_path: Path) -> None:
    """A client that reads slowly gets many tokens at once, each with twenty log-probabilities."""

    async def scene(it: Running) -> None:
        await it.call("acme", "POST", "/v1/adapters", json=section())
        text = "\u00e9" * 300_000

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            event = msgspec.json.encode({"model": "acme-sums.1@v3", "text": text})
            head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + b"data: " + event + b"\n\ndata: [DONE]\n\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        publish_endpoint(it.folder, "server", 0, {"data": server.sockets[0].getsockname()[1]})
        body = {"model": "sums", "prompt": "1 + 1 =", "stream": True}
        stream = await it.call("acme", "POST", "/v1/completions", json=body)
        first, done, end = stream.text.split("\n\n")
        assert msgspec.json.decode(first.removeprefix("data: ")) == {"model": "sums@v3", "text": text}
        assert (done, end) == ("data: [DONE]", "")
        server.close()

    play(tmp_path, scene)


def test_a_client_that_disconnects_ends_its_request_at_the_server(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        await it.call("acme", "POST", "/v1/adapters", json=section())
        received, ended = asyncio.Event(), asyncio.Event()

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            received.set()
            while await reader.read(1 << 16):
                pass
            ended.set()
            writer.close()

        sent = [{"type": "http.request", "body": b'{"model":"sums","prompt":"a","max_tokens":9}'}]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await received.wait()
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            pass

        server = await asyncio.start_server(never, "127.0.0.1", 0)
        publish_endpoint(it.folder, "server", 0, {"data": server.sockets[0].getsockname()[1]})
        key = f"Bearer {it.keys['acme']}".encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"authorization", key)]}
        app: Any = it.api.app()
        async with asyncio.timeout(60.0):
            await app(scope | {"query_string": b"", "server": ("service", 80), "scheme": "http"}, receive, send)
            await ended.wait()
        assert not +it.api.meter._tokens, "nothing of its quota is in use"
        server.close()

    play(tmp_path, scene)


def test_a_request_that_ends_its_server_reaches_no_other_one(tmp_path: Path) -> None:
    """One that fails without an answer, one that answers that it failed, and one that only loses the connection."""

    async def scene(it: Running) -> None:
        await it.call("acme", "POST", "/v1/adapters", json=section())
        asked: list[int] = []
        fate = "dies"

        async def serve(index: int) -> asyncio.Server:
            async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                status = "200 OK"
                if head.startswith("POST"):
                    asked.append(index)
                    status = "500 Internal Server Error" if fate == "fails" else status
                    if fate == "dies" or (fate == "loses it" and len(asked) == 1):
                        if fate == "dies":
                            servers[index].close()
                        writer.close()
                        return
                body = b'{"model":"acme-sums.1@v3","choices":[]}'
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                    + body
                )
                writer.close()

            server = await asyncio.start_server(handle, "127.0.0.1", 0)
            publish_endpoint(it.folder, "server", index, {"data": server.sockets[0].getsockname()[1]})
            return server

        body = {"model": "sums", "prompt": "1 + 1 ="}
        for fate, n_asked, status in (("fails", 1, 502), ("loses it", 2, 200), ("dies", 1, 502)):
            servers = [await serve(index) for index in range(3)]
            asked.clear()
            answer = await it.call("acme", "POST", "/v1/completions", json=body)
            assert (answer.status_code, len(asked), len(set(asked))) == (status, n_asked, 1), fate
            if fate == "dies":
                fate = "serves"
                after = await it.call("acme", "POST", "/v1/completions", json=body)
                assert (after.status_code, len(set(asked))) == (200, 2), "a server without a listener is passed over"
            for server in servers:
                server.close()

    play(tmp_path, scene)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[5]] * 60_000, "n": 16_384},
        {"prompt": ["a"] * 1025},
        {"prompt": "a", "n": 10**30},
        {"prompt": "a", "n": 1024, "max_tokens": 10**30},
        {"prompt": "a", "n": 1024, "max_tokens": 1000, "logprobs": 20},
        {"messages": [], "n": 1024, "logprobs": True, "top_logprobs": 200},
        {"prompt": [5, "a", [5]], "n": -1},
        {"prompt": 5},
    ],
)
def test_a_request_too_large_for_a_server_reaches_none(tmp_path: Path, body: dict[str, Any]) -> None:
    async def reply(body: dict[str, Any]) -> web.Response:
        return web.json_response({})

    async def scene(it: Running) -> None:
        await it.call("acme", "POST", "/v1/adapters", json=section())
        async with data_plane(it, 0, reply) as asked:
            refused(await it.call("acme", "POST", "/v1/completions", json=body | {"model": "sums"}), 422)
            assert asked == []

    play(tmp_path, scene, limits={"body_kib": 1024})


def test_a_client_that_stops_reading_holds_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's request ends, and with it the lease on the version; so do the tenant's tokens in progress."""
    monkeypatch.setattr(http, "STALL_S", 0.5)
    ended = asyncio.Event()

    async def scene(it: Running) -> None:
        await it.call("acme", "POST", "/v1/adapters", json=section())

        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            try:
                while True:
                    await response.write(b'data: {"choices":"' + b"x" * 4096 + b'"}\n\n')
            finally:
                ended.set()

        app = web.Application()
        app.router.add_post("/v1/completions", endless)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        publish_endpoint(it.folder, "server", 0, {"data": runner.addresses[0][1]})
        http = HttpServer(it.api.app(), sock := listening("127.0.0.1", 0, ""), None)
        serving = asyncio.create_task(http.serve())
        reader, writer = await asyncio.open_connection(*sock.getsockname()[:2], limit=4096)
        body = b'{"model":"sums","prompt":"a","stream":true}'
        key = it.keys["acme"]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert b"200" in await reader.readline()
        await asyncio.wait_for(ended.wait(), 120.0)
        assert it.api.meter._tokens == {}
        writer.close()
        http.should_exit = True
        await serving
        await runner.cleanup()

    play(tmp_path, scene)


def test_requests_a_minute_are_a_quota(tmp_path: Path) -> None:
    async def scene(it: Running) -> None:
        it.api.meter._clock = Clock()
        answers = [await it.call("acme", "GET", "/v1/models") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        refused(answers[-1], 429, "requests")
        assert answers[-1].headers["Retry-After"] == "20", "a third of a minute is one request"
        assert (await it.call("bolt", "GET", "/v1/models")).status_code == 200

    play(tmp_path, scene, {"requests": 3})


def test_a_body_that_does_not_come_is_refused_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.05)

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"name":'
        await asyncio.sleep(600)

    async def scene(it: Running) -> None:
        for path in ("/v1/adapters", "/api/v1/create_session", "/api/v1/forward_backward"):
            refused(await it.call("acme", "POST", path, content=slowly()), 408, "body")

    play(tmp_path, scene)

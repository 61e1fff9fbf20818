"""Archives of saved states: signed addresses that open one state, for a while, to whoever has them."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from safetensors.numpy import load, load_file

from areal_lora.errors import RequestError
from areal_lora.service.queue.client_sessions import expire
from areal_lora.service.queue.requests import Lora, encode
from areal_lora.service.tinker import checkpoints
from areal_lora.service.tinker.checkpoints import Archives, Permission
from tests.support.checkpoint import trained_run
from tests.support.service.running import Running, running, service_config

MODEL, ADAPTER, PATH = "s1:train:0", "acme-s1-0.1", "tinker://s1:train:0/weights/one"
ARCHIVE = "/api/v1/training_runs/s1:train:0/checkpoints/weights/one/archive"


def play(tmp_path: Path, scene: Callable[[Running, Path], Awaitable[None]]) -> None:
    """``scene`` with a service in which ``acme`` has saved a state, and the folder of that state."""
    trained, _ = trained_run.make_run(tmp_path, ADAPTER)

    async def run() -> None:
        async with running(service_config(tmp_path / "the runs")) as it:
            state = it.folder.saved_state(ADAPTER, "n3")
            state.parent.mkdir(parents=True)
            trained.adapter_checkpoints(ADAPTER).joinpath("v000003").rename(state)
            await note(it, "n3")
            await scene(it, state)

    asyncio.run(run())


async def note(it: Running, label: str) -> None:
    """The queue's row of the state."""
    lora = encode(Lora(rank=2, alpha=4.0, target_modules=("linear_qkv",)))
    values = (MODEL, "acme", ADAPTER, "weights", "one", label, 1, None, 3, 9, lora, time.time(), None, "{}")
    sql = f"INSERT OR REPLACE INTO saved_states VALUES ({', '.join('?' * 14)})"
    await it.writer.change(lambda tx: tx.do(sql, *values), time.time())


async def address(it: Running) -> str:
    answer = await it.call("acme", "GET", ARCHIVE)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["url"])


async def opened(it: Running, url: str) -> httpx.Response:
    """Without a key, as programs open it."""
    return await it.http.get(urlsplit(url).path)


def test_a_download_needs_no_model_and_deletes_nothing(tmp_path: Path) -> None:
    """What SDK 0.38 and the cookbook send: a state loaded into a new model, saved as external weights, deleted."""
    key = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"

    async def result(it: Running, verb: str, **body: object) -> dict[str, Any]:
        answer = await it.call("acme", "POST", f"/api/v1/{verb}", json=body)
        assert answer.status_code == 200, answer.text
        found = await it.call("acme", "POST", "/api/v1/retrieve_future", json=answer.json())
        return dict(found.json())

    async def scene(it: Running, state: Path) -> None:
        session = (await it.call("acme", "POST", "/api/v1/create_session", json={})).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "path": PATH, "optimizer": False}
        model = f"{session}:train:0"
        notes = {"created_by": "tinker_cookbook.weights.download"}
        assert await result(it, "load_weights", **asked, user_metadata=notes) == {"model_id": model}
        info = (await it.call("acme", "POST", "/api/v1/get_info", json={"model_id": model})).json()
        assert (info["model_id"], info["lora_rank"]) == (model, 2)
        assert not it.writer.tables.of("acme"), "no adapter was made"
        save = {"model_id": model, "seq_id": 1, "path": "download"}
        plain = (await result(it, "save_weights_external", **save))["path"]
        sealed = (await result(it, "save_weights_external", **save, age_encryption_recipients=[key]))["path"]
        assert plain == f"tinker://{MODEL}/external_weights/one"
        wrong = await it.call(
            "acme", "POST", "/api/v1/save_weights_external", json=save | {"age_encryption_recipients": ["x"]}
        )
        assert "age" in wrong.text

        url = "/api/v1/training_runs/{}/checkpoints/{}"
        for path, suffix in ((plain, ""), (sealed, ".age")):
            run, _, name = path.removeprefix("tinker://").partition("/")
            where = url.format(run, name)
            answer = (await it.call("acme", "GET", f"{where}/external_weights_urls")).json()
            assert sorted(answer["urls"]) == [f"adapter_config.json{suffix}", f"adapter_model.safetensors{suffix}"]
            found = (await opened(it, answer["urls"][f"adapter_config.json{suffix}"])).content
            assert found.startswith(b"age-encryption.org/v1\n-> X25519 " if suffix else b"{"), found[:60]
            assert (await it.call("bolt", "GET", f"{where}/external_weights_urls")).status_code == 404
            assert (await it.call("acme", "PUT", f"{where}/ttl", json={"ttl_seconds": 3600})).status_code == 204
            assert (await it.call("acme", "DELETE", where)).status_code == 204
        assert state.is_dir()
        kept = (await it.call("acme", "GET", "/api/v1/checkpoints")).json()["checkpoints"]
        assert [(each["tinker_path"], each["expires_at"]) for each in kept] == [(PATH, None)]

    play(tmp_path, scene)


def test_whoever_has_the_address_reads_the_state_and_no_pickle(tmp_path: Path) -> None:
    async def scene(it: Running, state: Path) -> None:
        answer = await opened(it, await address(it))
        assert answer.status_code == 200, answer.text
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
            assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
            model = tar.extractfile("adapter_model.safetensors")
            assert model is not None
            found = {values.tobytes() for values in load(model.read()).values()}
        kept = [load_file(file) for file in sorted(state.glob("rank-*.safetensors"))]
        weights = [v for file in kept for name, v in file.items() if name.startswith("weight/")]
        assert found == {values.tobytes() for values in weights}
        assert not any(it.folder.service_exports.iterdir()), "nothing of it stays"
        for caller in ("bolt", "acme"):
            path = ARCHIVE if caller == "bolt" else ARCHIVE.replace("one", "two")
            assert (await it.call(caller, "GET", path)).status_code == 404
        assert (await it.http.get(ARCHIVE)).status_code == 401, "an address is for caller has the key"

    play(tmp_path, scene)


def test_an_address_that_is_changed_old_or_of_another_run_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(it: Running, state: Path) -> None:
        url = await address(it)
        token = url.rpartition("/")[2]
        for at in range(0, len(token) - 1, 7):
            changed = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
            assert (await opened(it, url.replace(token, changed))).status_code == 404, at
        for wrong in (token[:-4], token + "AAAA", token[:43], "A" * 3000, "%00", "a.b"):
            assert (await opened(it, url.replace(token, wrong))).status_code == 404, wrong
        late_s = time.time() + checkpoints.OPEN_S + 1
        monkeypatch.setattr(checkpoints.time, "time", lambda: late_s)
        late = await opened(it, url)
        assert (late.status_code, late.json()["error"]["path"]) == (410, "token")
        monkeypatch.undo()
        assert (await opened(it, url)).status_code == 200
        await note(it, "n9")
        assert (await opened(it, url)).status_code == 410, "another state has the name now"
        await it.queue.change(lambda tx: expire(tx, tx.state("acme", PATH)))
        assert (await opened(it, url)).status_code == 404

    play(tmp_path, scene)


def test_each_run_signs_with_a_key_of_its_own(tmp_path: Path) -> None:
    may = Permission("acme", PATH, "n3", 1e12)
    made = []
    for name in ("one", "other"):

        async def run(name: str = name) -> None:
            async with running(service_config(tmp_path / name)) as it:
                made.append(Archives(it.queue, service_config(tmp_path / name), it.folder))

        asyncio.run(run())
    one, other = made
    assert one.permitted(one.signed(may)) == may
    with pytest.raises(RequestError) as refused:
        other.permitted(one.signed(may))
    assert refused.value.status == 404


def test_a_state_that_cannot_be_read_is_a_typed_answer(tmp_path: Path) -> None:
    async def scene(it: Running, state: Path) -> None:
        url = await address(it)
        (state / "rank-0000.safetensors").write_bytes(b"torn")
        answer = await opened(it, url)
        assert answer.status_code == 503
        error = msgspec.json.decode(answer.content)["error"]
        assert (error["path"], str(it.folder) in answer.text) == ("path", False)

    play(tmp_path, scene)

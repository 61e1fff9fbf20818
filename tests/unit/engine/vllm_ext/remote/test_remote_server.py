"""Servers elsewhere serve in a run: real groups, HTTP, publisher and controller; only models are missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from areal_lora.engine.vllm_ext.remote import remote_seat
from areal_lora.engine.vllm_ext.remote.remote_seat import RemoteAnswer, RemoteSettings
from areal_lora.engine.vllm_ext.remote.remote_server import GatewayClient, local_config, serve_remote
from areal_lora.errors import ConfigError, ProcessFailed
from areal_lora.network.tls import Plane, bearer_key
from areal_lora.rollout.completion_client import CompletionRequest, encoded
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_files
from areal_lora.weight_sync.trainer.decisions import PublishReport
from tests.support.clocks import WAIT_S, wait_until
from tests.support.engine.vllm_ext.remote_world import RUN, Machine, World, base_folder, equal, remote_run
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME, config
from tests.support.rollout.running import Running, controllers
from tests.support.weight_sync.helpers import ref, share, values

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with remote_run(tmp_path) as world:
        yield world


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with controllers(tmp_path) as start:
        yield start


def joined(world: World, root: Path) -> Machine:
    machine = world.machine(root)
    wait_until(world.publisher.changed, what="the remote server as one that may join")
    return machine


def members(report: PublishReport) -> list[str]:
    return [server.name for server in report.servers]


def test_a_remote_server_joins_follows_the_versions_and_leaves(world: World, tmp_path: Path) -> None:
    world.publish(0).wait()
    machine = joined(world, tmp_path)
    for version in (1, 2):
        report = world.publish(version).wait()
        assert (members(report), report.attempts) == (["server-0", "server-1"], 1)
        assert equal(machine.memory, world.local, version)
    assert world.damage.statuses == [200, 226], "the first whole, then what differs from it"
    name, tensor = share(values(2))[0][0]
    assert np.array_equal(machine.memory.tensors(ref(2, NAME))[name], tensor.numpy())
    machine.leave()
    wait_until(lambda: not published_files(world.folder, "server"), what="the end of its endpoint")
    wait_until(world.publisher.changed, what="the trainer's notice of it")
    report = world.publish(3).wait()
    assert (members(report), report.lost) == (["server-0"], {})


def test_wrong_bytes_are_refused_and_fetched_again_once(world: World, tmp_path: Path) -> None:
    world.publish(0).wait()
    machine = joined(world, tmp_path)
    for version in (1, 2):
        world.damage.left = 1
        report = world.publish(version).wait()
        assert (members(report), report.attempts) == (["server-0", "server-1"], 1)
        assert (world.damage.left, equal(machine.memory, world.local, version)) == (0, True)
    assert world.damage.statuses == [200, 200, 226, 200], "then whole"
    world.damage.left = 2
    report = world.publish(3).wait()
    assert (members(report), world.damage.left) == (["server-0"], 0)
    with pytest.raises(ProcessFailed, match=r"arrived with wrong bytes 2 times from .* use https"):
        machine.serving.result(WAIT_S)
    assert ref(3, NAME) not in machine.memory.held.active


def test_versions_go_through_a_store_which_holds_the_last_two_and_nothing_at_the_end(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()

    def versions() -> list[str]:
        return sorted(file.name.split("-")[1] for file in store.iterdir())

    with remote_run(tmp_path, store.as_uri()) as world:
        world.publish(0).wait()
        machines = []
        for version in (1, 2, 3):
            if version < 3:
                machines.append(joined(world, tmp_path))
            assert len(members(world.publish(version).wait())) == 1 + len(machines)
            assert all(equal(machine.memory, world.local, version) for machine in machines)
            assert versions() == [str(ref(v, NAME)) for v in range(max(1, version - 1), version + 1)], "one shard each"
        assert 0 < world.damage.nbytes < 1000, "the gateway sends names"
        world.end()
        assert versions() == []


def test_wrong_bytes_of_a_store_are_refused_and_its_errors_cost_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, read, write, faults = tmp_path / "store", LocalFileSystem.cat_file, LocalFileSystem.pipe_file, list[str]()

    def changed(files: LocalFileSystem, path: str, **how: int) -> bytes:
        found = bytearray(read(files, path, **how))
        if faults and faults[0] == "byte":
            found[len(found) // 2] ^= 1
            del faults[0]
        return bytes(found)

    def refused(files: LocalFileSystem, path: str, value: bytes) -> None:
        if faults and faults[0] == "full":
            del faults[0]
            raise KeyError("no space")  # schemes have errors of their own
        write(files, path, value)

    store.mkdir()
    monkeypatch.setattr(LocalFileSystem, "cat_file", changed)
    monkeypatch.setattr(LocalFileSystem, "pipe_file", refused)
    world = remote_run(tmp_path, store.as_uri())
    world.timeout_s = 600.0
    with world:
        world.publish(0).wait()
        machine = joined(world, tmp_path)
        world.publish(1).wait()
        faults += ["byte"]
        assert members(world.publish(2).wait()) == ["server-0", "server-1"]
        assert (faults, equal(machine.memory, world.local, 2)) == ([], True)
        faults += ["full"]
        began_s = time.monotonic()
        report = world.publish(3).wait()
        assert time.monotonic() - began_s < 120.0, "an attempt may take 240 s: all notice the failure at once"
        assert (members(report), report.attempts, faults) == (["server-0", "server-1"], 2, [])
        assert "pipe_file: KeyError('no space')" in caplog.text
        assert equal(machine.memory, world.local, 3)
        faults += ["byte", "byte"]
        assert members(world.publish(4).wait()) == ["server-0"]
        with pytest.raises(ProcessFailed, match="arrived with wrong bytes 2 times"):
            machine.serving.result(WAIT_S)
        assert ref(4, NAME) not in machine.memory.held.active


def test_a_line_that_breaks_in_the_middle_of_a_shard_costs_no_version(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_seat, "PART_BYTES", 400)
    world.publish(0).wait()
    machine = joined(world, tmp_path)
    world.publish(1).wait()
    world.damage.cut_at = 1000
    report = world.publish(2).wait()
    assert (members(report), report.attempts, world.damage.cut_at) == (["server-0", "server-1"], 1, None)
    *starts, last = world.damage.starts
    assert (starts, 0 < last < 2000) == ([0, 0], True)
    assert equal(machine.memory, world.local, 2)


def test_an_answer_may_be_longer_than_a_request(world: World, tmp_path: Path) -> None:
    """16 answers of 8,000 tokens along 48 layers of 8 experts have 50 MB of routes, as base64 67."""
    joined(world, tmp_path)

    async def answer() -> None:
        async with GatewayClient(world.url, world.token) as gateway:
            await gateway.send("POST", "server-1/answer", RemoteAnswer(number=999, status=200, body=bytes(67 << 20)))

    asyncio.run(answer())


def test_requests_in_progress_hold_up_neither_pings_nor_versions(world: World, tmp_path: Path) -> None:
    world.publish(0).wait()
    machine = joined(world, tmp_path)
    world.publish(1).wait()
    machine.data.delay_s = lambda k: WAIT_S
    body = encoded(CompletionRequest(prompt=[1], max_tokens=1, temperature=1.0, top_p=1.0, model=str(ref(1, NAME))))

    forward, loop = world.gateway.seats["server-1"].forward, world._loop.loop
    asked = [
        asyncio.run_coroutine_threadsafe(forward(Plane.DATA, "POST", "/v1/completions", body), loop) for _ in range(120)
    ]
    wait_until(lambda: machine.data.open_requests == 120, what="all requests in progress")
    assert members(world.publish(2).wait()) == ["server-0", "server-1"]
    assert not any(each.done() for each in asked)
    machine.leave()


def test_a_server_that_the_gateway_has_lost_joins_again(world: World, tmp_path: Path) -> None:
    world.publish(0).wait()
    machine = joined(world, tmp_path)
    world.publish(1).wait()
    world.lose_all()
    wait_until(lambda: "server-2" in world.gateway.seats, what="its second stay")
    wait_until(lambda: len(world.publisher._leader.roster.available()) == 1, what="its endpoint")  # type: ignore[union-attr]
    assert members(world.publish(2).wait()) == ["server-0", "server-2"]
    assert equal(machine.memory, world.local, 2)


def test_the_token_of_another_start_is_refused_in_one_line(world: World) -> None:
    async def ask(token: str) -> None:
        async with GatewayClient(world.url, token) as gateway:
            await gateway.get("settings", RemoteSettings)

    for token in (bearer_key("5e" * 32, Plane.REMOTE), bearer_key(world.secret, Plane.DATA), ""):
        with pytest.raises(ConfigError, match=r"does not take this token .*copy remote.token") as refused:
            asyncio.run(ask(token))
        assert "\n" not in str(refused.value)


def test_another_service_at_the_address_is_named_in_one_line() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    async def check() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(ConfigError, match=r"no gateway answers there: .* no answer of a gateway"):
                await serve_remote(url, "token")

    asyncio.run(check())


def test_what_a_remote_server_is_given_is_no_secret_of_the_run(world: World, tmp_path: Path) -> None:
    settings = world.settings()
    for secret in (world.secret, bearer_key(world.secret, Plane.ADMIN), bearer_key(world.secret, Plane.DATA)):
        assert secret.encode() not in settings.config + settings.shard_keys.hex().encode()
    made = local_config(settings, tmp_path / "here", None, None)
    assert (made.run.name, made.run.root, made.rollout.servers) == (RUN, tmp_path / "here", 1)
    other = base_folder(tmp_path / "other")
    (other / "config.json").write_text('{"another": 1}', encoding="utf-8")
    for folder in (other, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="not the run's base model"):
            local_config(settings, tmp_path, folder, None)


def test_servers_that_come_and_go_lose_no_prompt_and_train_none_twice(
    controller: Callable[..., Running], tmp_path: Path
) -> None:
    """Over a line with 100 ms. One leaves with requests in progress, one vanishes, others come."""
    run = controller(FakeServer(), eta=1, b=4, steps=6)

    def announce(report: PublishReport) -> None:
        urls = {server.name: server.data_url for server in report.servers}
        run.client.announce(report.ref, urls, [*report.lost], report.left)

    made = config(str(base_folder(tmp_path / "model")), eta=1)
    with World(RunFolder(tmp_path), made, delay_s=0.05, on_active=announce) as world:
        world.local_data.delay_s = lambda k: 0.5
        first = joined(world, tmp_path)
        first.data.delay_s = lambda k: 0.05 if k < 4 else WAIT_S
        seen, lags = set[str](), set[int]()
        for step in range(6):
            if step == 2:
                wait_until(lambda: first.data.open_requests, what="a request in progress")
                first.leave()
                second = joined(world, tmp_path)
                second.data.delay_s = lambda k: 0.05 if k < 2 else WAIT_S
            if step == 4:
                wait_until(lambda second=second: second.data.open_requests, what="a request in progress")
                second.vanish()
                third = joined(world, tmp_path)
            report = world.publish(step).wait()
            for group in run.batch(step).groups:
                assert group.uid not in seen
                seen.add(group.uid)
                lags |= {step - v for t in group.trajectories for v in t.versions if v >= 0}
        assert len(seen) == 24
        assert lags <= {0, 1}
        assert members(report) == ["server-0", "server-3"]
        assert third.data.requests
        stats = run.stats(NAME)
        assert stats.issued == stats.consumed + stats.leased + stats.ready + stats.running
        third.leave()

"""``areal-lora adapters`` against the real service, and without one."""

from __future__ import annotations

import asyncio
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from areal_lora.cli.app import main
from areal_lora.config.recorded import write_config
from areal_lora.network.http_server import HttpServer
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint
from tests.support.checkpoint import trained_run
from tests.support.paths import EXAMPLES
from tests.support.service.running import Running, running, service_config

FILE = str(EXAMPLES / "adapters" / "sums.yaml")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run folder whose service works, in a thread; an adapter of the operator has checkpoints."""
    config = service_config(tmp_path / "the runs")
    trained, _ = trained_run.make_run(tmp_path, "local-sums.1")
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with running(config) as it:
            write_config(it.folder, config)
            trained.checkpoints.rename(it.folder.checkpoints)
            await serve_until(it, ready, stop)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(120)
    yield config.run_folder
    loop.call_soon_threadsafe(stop.set)
    thread.join(120)
    loop.close()


async def serve_until(it: Running, ready: threading.Event, stop: object) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    server: uvicorn.Server = HttpServer(it.api.app(), sock, None)
    task = asyncio.create_task(server.serve())
    publish_endpoint(it.folder, "service", 0, {"api": sock.getsockname()[1]})
    ready.set()
    await stop.wait()  # type: ignore[attr-defined]
    server.should_exit = True
    await task


def ask(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["adapters", *words]) == code, capsys.readouterr()
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


def test_an_adapter_from_the_command_line(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(run)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for what is on this machine
    assert ask(capsys, "list", where) == "no adapters\n"
    assert ask(capsys, "create", where, FILE) == "sums is accepted, incarnation 1\n"
    assert "there is an adapter 'sums'" in ask(capsys, "create", where, FILE, code=64)
    assert ask(capsys, "pause", where, "sums") == "sums is wanted paused\n"
    assert ask(capsys, "list", where).splitlines()[1].split()[:4] == ["sums", "waits", "(paused", "is"]
    assert "linear_qkv" in ask(capsys, "show", where, "sums")
    assert ask(capsys, "resume", where, "sums") == "sums is wanted active\n"
    with run.metrics.open("a") as file:
        file.write('{"kind":"state","adapter":"local-sums.1","state":"active","version":0,"reason":"","time_s":1.5}\n')
    assert ask(capsys, "metrics", where, "sums") == "", "the service has not looked yet"
    assert ask(capsys, "download", where, "sums", str(tmp_path / "a file.tar"), "--version", "2").endswith(" bytes\n")
    with tarfile.open(tmp_path / "a file.tar") as tar:
        assert len(tar.getnames()) == 2
    key = ask(capsys, "keys", where, "acme").strip()
    assert '"adapters": 1' in ask(capsys, "keys", where, "acme", "--quota", "adapters=1")
    assert '"saved": 2048' in ask(capsys, "keys", where, "local", "--quota", "saved=2048")
    assert "local: keys operator" in ask(capsys, "keys", where).splitlines()
    monkeypatch.setenv("AREAL_LORA_KEY", key)
    assert ask(capsys, "list", where) == "no adapters\n", "another tenant sees its own, with the key that it had"
    assert "the quota is 1 adapters" in (
        ask(capsys, "create", where, FILE) and ask(capsys, "create", where, FILE, "--name", "two", code=64)
    )
    monkeypatch.delenv("AREAL_LORA_KEY")
    assert ask(capsys, "keys", where, "third", "--quota", "rank=4").startswith("tml-")
    assert ask(capsys, "keys", where, "acme", "--remove") == "acme: key default has ended\n"
    monkeypatch.setenv("AREAL_LORA_KEY", key)
    assert "not valid" in ask(capsys, "list", where, code=64)
    monkeypatch.delenv("AREAL_LORA_KEY")
    assert ask(capsys, "delete", where, "sums") == "sums is wanted deleted\n"


def test_without_a_service_the_reason_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = service_config(tmp_path)
    config.run_folder.path.mkdir()
    write_config(config.run_folder, config)
    assert "no service works there" in ask(capsys, "list", str(config.run_folder), code=64)
    assert "AREAL_LORA_KEY: it is not set" in ask(capsys, "list", "http://127.0.0.1:1", code=64)

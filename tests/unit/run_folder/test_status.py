"""Statuses are replaced whole, and a bad disk costs one status only."""

import errno
import logging
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_lora.processes.log import ROOT, setup_logging
from areal_lora.run_folder import status
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import LOADING, STALE_S, LoadingServers, read_statuses, renewed_status, set_status
from tests.support.clocks import wait_until


@pytest.fixture
def restore_logging() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before[0], before[1], before[2]


def test_statuses_round_trip_in_name_order(tmp_path: Path) -> None:
    assert read_statuses(RunFolder(tmp_path)) == {}
    set_status(RunFolder(tmp_path), "trainer", 1, "loading the base model")
    set_status(RunFolder(tmp_path), "server", 0, "waiting for\nworkers")
    set_status(RunFolder(tmp_path), "trainer", 1, "training")
    assert list(read_statuses(RunFolder(tmp_path)).items()) == [
        ("server-0", "waiting for workers"),
        ("trainer-1", "training"),
    ]


@pytest.mark.usefixtures("restore_logging")
def test_a_full_disk_keeps_a_status_back_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_status(RunFolder(tmp_path), "trainer", 0, "training")
    setup_logging("trainer", 0)
    soft_hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, soft_hard[1]))
    try:
        set_status(RunFolder(tmp_path), "trainer", 0, "waiting for rollouts")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    assert read_statuses(RunFolder(tmp_path)) == {"trainer-0": "training"}
    assert [path.name for path in (tmp_path / "status").iterdir()] == ["trainer-0.txt"]
    assert "trainer-0.txt cannot be written: File too large" in capsys.readouterr().err


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    texts = ["a" * 4000, "b" * 4000]
    set_status(RunFolder(tmp_path), "server", 0, texts[0])
    done = threading.Event()

    def write() -> None:
        for i in range(200):
            set_status(RunFolder(tmp_path), "server", 0, texts[i % 2])
        done.set()

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while not done.is_set():
        assert read_statuses(RunFolder(tmp_path))["server-0"] in texts
    for writer in writers:
        writer.join()
    assert read_statuses(RunFolder(tmp_path)).keys() == {"server-0"}


def test_a_status_that_is_replaced_while_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_status(RunFolder(tmp_path), "trainer", 0, "step 3")
    set_status(RunFolder(tmp_path), "server", 0, "serving")
    read = Path.read_text

    def stale(path: Path, encoding: str | None = None) -> str:
        if path.stem == "server-0":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path, encoding)

    monkeypatch.setattr(Path, "read_text", stale)
    assert read_statuses(RunFolder(tmp_path)) == {"trainer-0": "step 3"}


def test_a_server_loads_for_as_long_as_it_renews_its_status(tmp_path: Path) -> None:
    folder, now = RunFolder(tmp_path), 0.0
    servers = LoadingServers(folder, lambda: now)
    assert servers.names() == ()
    set_status(folder, "server", 0, LOADING)
    set_status(folder, "server", 1, "serving")
    set_status(folder, "trainer", 0, LOADING)
    for renewal in range(1, 100):
        os.utime(folder.status("server-0"), ns=(renewal, renewal))  # the clock of the file system is another one
        assert servers.names() == ("server-0",)
        now += STALE_S - 1
        assert servers.names() == ("server-0",)
    now += 1
    assert servers.names() == (), "its process has ended"
    set_status(folder, "server", 0, LOADING)
    assert servers.names() == ("server-0",), "it was restarted"
    set_status(folder, "server", 0, "serving")
    assert servers.names() == ()


def test_a_renewed_status_is_written_until_its_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "RENEW_S", 0.01)
    folder = RunFolder(tmp_path)
    with renewed_status(folder, "server", 0, LOADING):
        for _ in range(2):
            wait_until(lambda: folder.status("server-0").is_file())
            folder.status("server-0").unlink()
        wait_until(lambda: read_statuses(folder) == {"server-0": LOADING})
    set_status(folder, "server", 0, "serving")
    assert read_statuses(folder) == {"server-0": "serving"}

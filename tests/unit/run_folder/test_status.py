"""Statuses are replaced whole, and a bad disk costs one status only."""

import errno
import logging
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_lora.processes.log import ROOT, setup_logging
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import read_statuses, set_status


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

"""Logging: one line per record whatever a message holds; statuses are replaced whole."""

import errno
import logging
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_lora.processes.log import ROOT, get_logger, read_statuses, set_status, setup_logging


@pytest.fixture
def restore_logging() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before[0], before[1], before[2]


@pytest.mark.usefixtures("restore_logging")
def test_a_message_cannot_forge_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer", 3)
    get_logger("areal_lora.trainer.main").warning("model wrote %s", "a\n00:00:00.000 server-0 ERROR x: down")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert " trainer-3 WARNING trainer.main: model wrote a\\n00:00" in lines[0]


@pytest.mark.usefixtures("restore_logging")
def test_second_setup_replaces_the_first_and_tracebacks_are_indented(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("controller", 0)
    setup_logging("server", 1)
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger("__main__").exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert " server-1 ERROR main: failed" in lines[0]
    assert len(lines) > 2
    assert all(line.startswith("    ") for line in lines[1:])
    assert lines[-1].endswith("ValueError: boom")


def test_statuses_round_trip_in_name_order(tmp_path: Path) -> None:
    assert read_statuses(tmp_path) == {}
    set_status(tmp_path, "trainer", 1, "loading the base model")
    set_status(tmp_path, "server", 0, "waiting for\nworkers")
    set_status(tmp_path, "trainer", 1, "training")
    assert list(read_statuses(tmp_path).items()) == [("server-0", "waiting for workers"), ("trainer-1", "training")]


@pytest.mark.usefixtures("restore_logging")
def test_a_full_disk_keeps_a_status_back_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_status(tmp_path, "trainer", 0, "training")
    setup_logging("trainer", 0)
    soft_hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, soft_hard[1]))
    try:
        set_status(tmp_path, "trainer", 0, "waiting for rollouts")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    assert read_statuses(tmp_path) == {"trainer-0": "training"}
    assert [path.name for path in (tmp_path / "status").iterdir()] == ["trainer-0.txt"]
    assert "trainer-0.txt cannot be written: File too large" in capsys.readouterr().err


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    texts = ["a" * 4000, "b" * 4000]
    set_status(tmp_path, "server", 0, texts[0])
    done = threading.Event()

    def write() -> None:
        for i in range(200):
            set_status(tmp_path, "server", 0, texts[i % 2])
        done.set()

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while not done.is_set():
        assert read_statuses(tmp_path)["server-0"] in texts
    for writer in writers:
        writer.join()
    assert read_statuses(tmp_path).keys() == {"server-0"}


def test_a_status_that_is_replaced_while_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_status(tmp_path, "trainer", 0, "step 3")
    set_status(tmp_path, "server", 0, "serving")
    read = Path.read_text

    def stale(path: Path, encoding: str | None = None) -> str:
        if path.stem == "server-0":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path, encoding)

    monkeypatch.setattr(Path, "read_text", stale)
    assert read_statuses(tmp_path) == {"trainer-0": "step 3"}

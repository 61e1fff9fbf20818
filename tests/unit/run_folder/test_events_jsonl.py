"""A torn last line of a JSONL file is cut; lines that are no events are skipped."""

import errno
import os
from pathlib import Path

import pytest

from areal_lora.errors import ExitCode, RecordError
from areal_lora.run_folder import events
from areal_lora.run_folder.events import (
    JsonlSink,
    RequeueEvent,
    StartEvent,
    count_requeues,
    note_event,
    read_events,
    write_event,
)
from areal_lora.run_folder.paths import RunFolder

PAGE_BYTES = 1 << 16


@pytest.mark.parametrize("torn", [1, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 5])
@pytest.mark.parametrize("before", [b"", b"{}\n", b"{}\n" * PAGE_BYTES])
def test_a_torn_line_of_any_length_is_cut(tmp_path: Path, before: bytes, torn: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(before + b"x" * torn)
    sink = JsonlSink(path)
    assert sink.nbytes == len(before)
    sink.write(b"[]")
    sink.close()
    assert path.read_bytes() == before + b"[]\n"


@pytest.mark.parametrize("line", [b"\0" * 60, b'{"kind": "sta', b'{"kind": "other"}', b"\xff\xfe"])
def test_a_line_that_is_no_event_hides_no_other(tmp_path: Path, line: bytes) -> None:
    run = RunFolder(tmp_path)
    start, requeue = StartEvent(at="", resumes=False), RequeueEvent(at="", job="1", why="", without=0)
    write_event(run, start)
    with run.events.open("ab") as file:
        file.write(line + b"\n")
    write_event(run, requeue)
    assert read_events(run) == [start, requeue]
    assert count_requeues(run) == 1


class Refused:
    """A file of a disk that takes nothing."""

    name = "x.jsonl"

    def __init__(self, path: Path, code: int) -> None:
        self._file, self._error = path.open("ab"), OSError(code, os.strerror(code))

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, line: bytes) -> int:
        raise self._error

    def truncate(self, size: int) -> int:
        raise self._error


FULL, PASSES = ("ENOSPC", "EDQUOT", "EROFS"), ("EIO", "ESTALE", "ENOTCONN", "ESHUTDOWN", "ETIMEDOUT")


@pytest.mark.parametrize(
    ("name", "code"), [*((n, ExitCode.DISK) for n in FULL), *((n, ExitCode.TEMPORARY) for n in PASSES)]
)
def test_a_process_that_a_passing_error_of_the_file_system_ends_is_restarted(
    tmp_path: Path, name: str, code: ExitCode
) -> None:
    sink = JsonlSink(tmp_path / "x.jsonl")
    sink._file = Refused(tmp_path / "x.jsonl", getattr(errno, name))  # type: ignore[assignment]
    with pytest.raises(RecordError, match="a record cannot be written") as raised:
        sink.write(b"{}")
    assert raised.value.exit_code == code


def test_what_the_launcher_does_needs_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, event = RunFolder(tmp_path), StartEvent(at="", resumes=False)

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(events, "_cut_torn_tail", stale)
        note_event(run, event)
        with pytest.raises(OSError, match="Stale"):
            write_event(run, event)
    note_event(run, event)
    assert read_events(run) == [event]

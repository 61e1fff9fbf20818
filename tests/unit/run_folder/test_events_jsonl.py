"""A torn last line of a JSONL file is cut; lines that are no events are skipped."""

from pathlib import Path

import pytest

from areal_lora.run_folder.events import JsonlSink, RequeueEvent, StartEvent, count_requeues, read_events, write_event
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

"""A torn last line of a JSONL file is cut."""

from pathlib import Path

import pytest

from areal_lora.run_folder.events import JsonlSink

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

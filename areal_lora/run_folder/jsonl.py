"""Append-only files of one JSON record per line, safe against a crash in the middle of a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from areal_lora.errors import RecordError

BLOCK_BYTES = 1 << 16


class JsonlSink:
    """Appends whole lines; each is in the file, readable by others, when ``write`` returns.

    A process killed in the middle of a line leaves a torn tail. It is cut off when the file is
    opened again, so that a resumed run never glues a new record to half an old one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._file = path.open("ab", buffering=0)

    def write(self, line: bytes) -> None:
        """Append one record, or nothing: raises RecordError. ``line`` holds no line break: JSON escapes them."""
        left, start = line + b"\n", os.fstat(self._file.fileno()).st_size
        try:
            while left:
                # A disk that gets full takes a part first.
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(start)
            raise refused(self._file.name, error) from error

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Return when everything written is on the disk: then it also survives a loss of power."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def refused(path: Path | str, error: OSError) -> RecordError:
    """Build the error for a failed write of records."""
    return RecordError(
        f"{path}: a record cannot be written: {error.strerror} (fix: make room on the disk, or repair it, then start "
        "the same command: it resumes from the newest checkpoint)"
    )


def whole_lines(path: Path, end: int | None = None) -> Iterator[bytes]:
    """The lines of ``path`` that are whole, one at a time; those that start before byte ``end``, if it is given."""
    at = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or (end is not None and at >= end):
                return
            at += len(line)
            yield line


def _cut_torn_tail(path: Path) -> None:
    """Cut what follows the last line break. The file is read backwards from its end, block by block."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = at = file.seek(0, os.SEEK_END)
        while at:
            start = max(0, at - BLOCK_BYTES)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                at = start + found + 1
                break
            at = start
        if at < size:
            file.truncate(at)

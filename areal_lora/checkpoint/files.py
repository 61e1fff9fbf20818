"""Everything a checkpoint does to a disk, one small operation at a time, so that each can be made to fail."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from areal_lora.checkpoint.state import FileEntry

CHUNK_BYTES = 8 << 20


class Disk:
    """Plain operations; all raise OSError. The tests' `FaultyDisk` is one whose n-th operation fails.

    ``about_to`` is called before each: ``mkdir``, ``open``, ``write`` (once per chunk), ``fsync``,
    ``rename``, ``remove``.
    """

    def about_to(self, operation: str, path: Path) -> None:
        """Nothing; for fakes."""

    def make_folder(self, path: Path) -> None:
        self.about_to("mkdir", path)
        path.mkdir()

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> FileEntry:
        """A new file that is on the disk when this returns, its entry in the folder aside (see ``fsync``)."""
        sum_, size = hashlib.blake2b(digest_size=16), 0
        self.about_to("open", path)
        with path.open("xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                for at in range(0, len(view), CHUNK_BYTES):
                    chunk = view[at : at + CHUNK_BYTES]
                    sum_.update(chunk)
                    self.about_to("write", path)
                    size += self._write_all(file.fileno(), chunk)
            self.about_to("fsync", path)
            os.fsync(file.fileno())
        return FileEntry(name=path.name, nbytes=size, blake2b=sum_.hexdigest())

    def fsync_folder(self, path: Path) -> None:
        """Make the names in ``path`` last."""
        self.about_to("fsync", path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        self.about_to("rename", to)
        path.rename(to)

    def remove(self, path: Path) -> None:
        """A folder with all that is in it, or a file. What is missing already is no error."""
        self.about_to("remove", path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def _write_all(self, fd: int, data: memoryview) -> int:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        return done

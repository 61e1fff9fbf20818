"""A disk that fails, for tests of what follows from it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from areal_lora.checkpoint.state import Disk


class FaultyDisk(Disk):
    """The ``fail_at``-th operation (from 1) raises ``code``, or is ``torn``: a write of which half is lost, untold.

    ``fail_at`` 0: nothing fails. ``log`` are all operations so far.
    """

    def __init__(self, fail_at: int = 0, code: int = errno.EIO, torn: bool = False) -> None:
        self.fail_at, self.code, self.torn = fail_at, code, torn
        self.log: list[tuple[str, Path]] = []
        self._tearing = False

    def about_to(self, operation: str, path: Path) -> None:
        self.log.append((operation, path))
        if len(self.log) != self.fail_at:
            return
        if self.torn:
            self._tearing = operation == "write"
            return
        raise OSError(self.code, f"{os.strerror(self.code)} (injected)", str(path))

    def _write_all(self, fd: int, data: memoryview) -> int:
        if self._tearing:
            self._tearing = False
            os.write(fd, data[: len(data) // 2])
            return len(data)
        return super()._write_all(fd, data)

"""Adapters that the operator puts into the run folder: ``RUN/inbox/NAME.yaml``, each an entry of ``adapters``.

    NAME.yaml --accepted--> accepted/NAME.yaml
              --refused---> NAME.yaml.error beside it; a changed file is tried again

A file is read when it has not changed between two looks, so it may also be written in place. Its idempotency key is
the file itself: a crash between acceptance and the move creates nothing twice.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from areal_lora.config.sources import read_source
from areal_lora.errors import ConfigError
from areal_lora.processes.faults import reached
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.atomic import write_file
from areal_lora.service.refused import RequestError, Unavailable

EVERY_S = 0.5
SUFFIXES = (".yaml", ".yml")
ACCEPTED, ERROR = "accepted", ".error"
MAX_BYTES = 1 << 20

Mark = tuple[int, int, int]
"""Inode, time of change and size of a file: equal while nothing changes it."""
TakeIn = Callable[[dict[str, Any], str], Awaitable[None]]

log = get_logger(__name__)


class FolderInbox:
    """One folder, mode 0700. ``take_in`` gets the section and the idempotency key, and raises RequestError."""

    def __init__(self, folder: Path, take_in: TakeIn) -> None:
        self._folder, self._take_in = folder, take_in
        self._seen: dict[str, Mark] = {}
        self._refused: dict[str, Mark] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / ACCEPTED).mkdir(mode=0o700, exist_ok=True)

    async def look(self) -> None:
        """Take in what has not changed since the last look."""
        now = dict(self._files())
        for name, mark in sorted(now.items()):
            if self._seen.get(name) == mark and self._refused.get(name) != mark:
                await self._try(self._folder / name, mark)
        self._seen = now
        self._refused = {name: mark for name, mark in self._refused.items() if name in now}

    def _files(self) -> Iterator[tuple[str, Mark]]:
        for entry in os.scandir(self._folder):
            if not entry.name.endswith(SUFFIXES) or entry.name.startswith("."):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield entry.name, (found.st_ino, found.st_mtime_ns, found.st_size)

    async def _try(self, path: Path, mark: Mark) -> None:
        error = path.with_name(path.name + ERROR)
        try:
            if mark[2] > MAX_BYTES:
                raise RequestError(
                    413, path.name, f"it is longer than {MAX_BYTES} bytes", "an adapter's section is short"
                )
            section = read_source(path).data
            sign = hashlib.sha256(repr((path.name, mark)).encode()).hexdigest()
            await self._take_in(section, f"inbox {sign}")
        except Unavailable as unavailable:
            log.warning("%s is read again later: %s", path, unavailable)
            return
        except (RequestError, ConfigError) as refused:
            self._refused[path.name] = mark
            log.warning("%s is refused: %s", path, refused)
            write_file(error, f"{refused}\n")
            return
        reached("service.inbox_taken")
        path.rename(path.parent / ACCEPTED / path.name)
        error.unlink(missing_ok=True)
        log.info("%s is accepted", path)

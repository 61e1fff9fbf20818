"""Which shared memory processes use, so that it can be removed when they die without doing so."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")


def entries() -> set[str]:
    """Names of everything there is now."""
    return {p.name for p in FOLDER.iterdir() if p.is_file()} if FOLDER.is_dir() else set()


def used_by(pids: Iterable[int]) -> set[str]:
    """Names of what one of ``pids`` has open or mapped.

    Found by inode: a semaphore is mapped under another name than it has, because glibc makes it under a
    temporary one and then links it.
    """
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    return {name for name in entries() if _inode(FOLDER / name) in inodes}


def _inodes(pid: int) -> Iterator[int]:
    prefix = f"{FOLDER}/"
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if prefix in line:
                yield int(line.split(maxsplit=5)[4])
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(fd).startswith(prefix):
                yield fd.stat().st_ino
    except OSError:
        return  # it ended while we looked, or is not ours to look at


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def remove(names: Iterable[str]) -> None:
    for name in names:
        (FOLDER / name).unlink(missing_ok=True)

"""Which shared memory processes use, so that it can be removed when they die without doing so."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
    inodes, found = {inode for pid in pids for inode in _inodes(pid)}, set()
    for name in entries():
        with suppress(FileNotFoundError):
            if (FOLDER / name).stat().st_ino in inodes:
                found.add(name)
    return found


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


def remove(names: Iterable[str]) -> None:
    for name in names:
        (FOLDER / name).unlink(missing_ok=True)

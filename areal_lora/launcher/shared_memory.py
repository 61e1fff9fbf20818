"""Which shared memory processes use, so that it can be removed when they die without doing so."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")


def entries() -> set[str]:
    """Names of everything there is now."""
    return {p.name for p in FOLDER.iterdir() if p.is_file()} if FOLDER.is_dir() else set()


def used_by(pids: Iterable[int]) -> set[str]:
    """Names that one of ``pids`` has open or mapped."""
    prefix = f"{FOLDER}/"
    names: set[str] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            names |= {line.partition(prefix)[2] for line in maps.splitlines() if prefix in line}
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(fd)
                if target.startswith(prefix):
                    names.add(target.removeprefix(prefix))
        except OSError:
            # It ended while we looked, or is not ours to look at.
            continue
    return names


def remove(names: Iterable[str]) -> None:
    for name in names:
        (FOLDER / name).unlink(missing_ok=True)

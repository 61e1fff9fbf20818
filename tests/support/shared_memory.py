"""What lies in /dev/shm. The other lane of the suite has files there, too, which living processes hold."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


def names() -> set[str]:
    return {path.name for path in FOLDER.iterdir()}


def in_use() -> set[str]:
    """Names that some living process has mapped or open."""
    found: set[str] = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(str(descriptor.readlink()).partition(f"{FOLDER}/")[2])
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = maps.read_text(errors="replace").splitlines()
            found |= {line.partition(f"{FOLDER}/")[2] for line in lines if f"{FOLDER}/" in line}
    return found


def left_behind(before: set[str]) -> set[str]:
    """New since ``before``, and of no living process, without what others make and remove meanwhile."""
    return (names() - before - in_use()) & names()

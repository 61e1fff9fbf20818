"""Signs of life: each process touches ``<run_folder>/heartbeats/<role>-<index>`` while it gets on with its work.

A beat comes from the thread that must not get stuck: trainer rank 0 beats in its loop and in its
waits, controller and servers from a task of their event loop. The launcher compares beats with
those it saw before, so no two clocks are compared.
"""

from __future__ import annotations

import time
from pathlib import Path

FOLDER = "heartbeats"
EVERY_S = 1.0

_last: dict[Path, float] = {}


def beat(run_folder: Path | str, role: str, index: int) -> None:
    """Say that ``role-index`` is getting on. Costs nothing when called again within a second."""
    path = Path(run_folder) / FOLDER / f"{role}-{index}"
    now = time.monotonic()
    if now - _last.get(path, -EVERY_S) < EVERY_S:
        return
    _last[path] = now
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def beat_on(run_folder: Path | str, role: str, index: int) -> None:
    """``beat``, but never the first: for waits that may come before ``role-index`` has begun its work."""
    if Path(run_folder) / FOLDER / f"{role}-{index}" in _last:
        beat(run_folder, role, index)


def last_beats(run_folder: Path | str) -> dict[str, int]:
    """``{"trainer-0": time of the last beat in ns}`` by the file system's clock; processes that never beat are absent.

    To be compared with an earlier answer only.
    """
    beats = {}
    for path in (Path(run_folder) / FOLDER).glob("*-*"):
        try:
            beats[path.name] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return beats


def forget_beats(run_folder: Path | str, role: str, index: int) -> None:
    """Before ``role-index`` is started again: only its next life's beats count."""
    (Path(run_folder) / FOLDER / f"{role}-{index}").unlink(missing_ok=True)

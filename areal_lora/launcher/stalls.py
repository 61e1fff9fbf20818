"""Record a stall: the stacks of all processes and the status of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import read_statuses

WRITE_S, SETTLE_S = 3.0, 0.3


def write_stall(run_folder: RunFolder, ask: Callable[[], int], stuck: str) -> Path:
    """Gather the stacks of all processes in ``stacks/stall-N.txt``; returns that file.

    ``ask`` asks them to write their stacks and returns how many will do so.
    """
    folder = run_folder.stacks
    folder.mkdir(exist_ok=True)
    before = _sizes(folder)
    _wait_for(folder, before, ask())
    parts = [f"{stuck}; {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"]
    statuses = read_statuses(run_folder)
    for name in sorted(statuses.keys() | {path.stem for path in before}):
        path = run_folder.stack_dump(name)
        text = path.read_bytes()[before.get(path, 0) :].decode("utf-8", "replace") if path.exists() else ""
        if text or name in statuses:
            parts.append(f"==== {name}: {statuses.get(name, '')}\n{text or '(no answer)'}")
    n = 1
    while (target := folder / f"stall-{n}.txt").exists():
        n += 1
    target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return target


def waits(run_folder: RunFolder) -> str:
    """``trainer-0: step 3: waiting for rollouts; server-0: serving``."""
    return "; ".join(f"{who}: {text}" for who, text in read_statuses(run_folder).items())


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.glob("*.txt") if not path.stem.startswith("stall-")}


def _wait_for(folder: Path, before: dict[Path, int], asked: int) -> None:
    """Until ``asked`` files have grown and grow no more; a process that is stopped never answers."""
    deadline = time.monotonic() + WRITE_S
    sizes, changed_at = before, time.monotonic()
    while (now := time.monotonic()) < deadline:
        latest = _sizes(folder)
        if latest != sizes:
            sizes, changed_at = latest, now
        grown = sum(size > before.get(path, 0) for path, size in sizes.items())
        if grown >= asked and now - changed_at > SETTLE_S:
            return
        time.sleep(0.05)

"""Find processes whose heartbeats have stopped, and record a stall: stacks and status of every process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import read_statuses

WRITE_S, SETTLE_S = 3.0, 0.3


def write_stall(run_folder: RunFolder, request: Callable[[], int], stuck: str) -> Path:
    """Gather the stacks of all processes in ``stacks/stall-N.txt``; returns that file.

    ``request`` has them write their stacks and returns how many will do so.
    """
    folder = run_folder.stacks
    folder.mkdir(exist_ok=True)
    before = _sizes(folder)
    _wait_for(folder, before, request())
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
    return "; ".join(f"{process}: {text}" for process, text in read_statuses(run_folder).items())


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.glob("*.txt") if not path.stem.startswith("stall-")}


def _wait_for(folder: Path, before: dict[Path, int], requested: int) -> None:
    """Until ``requested`` files have grown and grow no more; a process that is stopped never answers."""
    deadline = time.monotonic() + WRITE_S
    sizes, changed_at = before, time.monotonic()
    while (now := time.monotonic()) < deadline:
        latest = _sizes(folder)
        if latest != sizes:
            sizes, changed_at = latest, now
        grown = sum(size > before.get(path, 0) for path, size in sizes.items())
        if grown >= requested and now - changed_at > SETTLE_S:
            return
        time.sleep(0.05)


LONGEST_LOOK_S = 5.0
"""Limit of the silence counted between two looks: a longer gap means that the launcher or the machine was stopped."""


@dataclass(slots=True)
class _Session:
    beat: int
    first: float
    last: float
    excused: float = 0.0

    def silent_s(self, now: float) -> float:
        return now - self.last - self.excused


@dataclass(slots=True)
class Pulse:
    """Silence of each process. ``limits``: seconds without a heartbeat that a role may take.

    Ages are measured between the launcher's own looks, so no clock of another process matters. Time in which the
    launcher did not look is no silence: after a suspend all processes have been silent for as long.
    """

    limits: Mapping[str, float]
    _sessions: dict[str, _Session] = field(default_factory=dict)
    _looked: float | None = None

    def look(self, beats: Mapping[str, int], now: float) -> None:
        """Take in what ``heartbeat.last_beats`` returned at ``now``."""
        unseen = max(0.0, now - self._looked - LONGEST_LOOK_S) if self._looked is not None else 0.0
        self._looked = now
        for known in self._sessions.values():
            known.excused += unseen
        for name, beat in beats.items():
            if name not in self._sessions:
                self._sessions[name] = _Session(beat, now, now)
            elif (session := self._sessions[name]).beat != beat:
                session.beat, session.last, session.excused = beat, now, 0.0

    def silent(self, now: float) -> dict[str, float]:
        """Seconds of silence by process, for those that have beaten and then not beaten for longer than their limit."""
        silences = {name: session.silent_s(now) for name, session in self._sessions.items()}
        return {name: s for name, s in silences.items() if s > self.limits[name.rpartition("-")[0]]}

    def worked_s(self, name: str) -> float | None:
        """Seconds from the first heartbeat of ``name`` to its last; None before the first."""
        session = self._sessions.get(name)
        return None if session is None else session.last - session.first

    def forget(self, name: str) -> None:
        """End the session of ``name``; its next beat starts the next one."""
        self._sessions.pop(name, None)

"""Find processes whose heartbeats have stopped. Pure: beats and time are passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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

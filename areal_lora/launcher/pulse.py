"""Which processes have fallen silent, from the signs of life seen so far. Pure: beats and time are passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LONGEST_LOOK_S = 5.0
"""Of a longer time between two looks no more counts as silence: the launcher itself was stopped, or the machine."""


@dataclass(slots=True)
class _Life:
    beat: int
    first: float
    last: float
    excused: float = 0.0

    def silent_s(self, now: float) -> float:
        return now - self.last - self.excused


@dataclass(slots=True)
class Pulse:
    """``limits`` are the seconds of silence that each role may keep.

    Ages are measured between the launcher's own looks, so no clock of another process matters. Time in which the
    launcher did not look is nobody's silence: after a suspend all processes have been silent for as long.
    """

    limits: Mapping[str, float]
    _lives: dict[str, _Life] = field(default_factory=dict)
    _looked: float | None = None

    def look(self, beats: Mapping[str, int], now: float) -> None:
        """Take in what ``heartbeat.last_beats`` said at ``now``."""
        unseen = max(0.0, now - self._looked - LONGEST_LOOK_S) if self._looked is not None else 0.0
        self._looked = now
        for known in self._lives.values():
            known.excused += unseen
        for name, beat in beats.items():
            if name not in self._lives:
                self._lives[name] = _Life(beat, now, now)
            elif (life := self._lives[name]).beat != beat:
                life.beat, life.last, life.excused = beat, now, 0.0

    def silent(self, now: float) -> dict[str, float]:
        """Seconds of silence of those that have shown signs of life and then none for longer than their limit."""
        silences = {name: life.silent_s(now) for name, life in self._lives.items()}
        return {name: s for name, s in silences.items() if s > self.limits[name.rpartition("-")[0]]}

    def worked_s(self, name: str) -> float | None:
        """From the first sign of life of ``name`` to its last; None where there was none."""
        life = self._lives.get(name)
        return None if life is None else life.last - life.first

    def forget(self, name: str) -> None:
        """``name`` ended: its next life begins with its next first beat."""
        self._lives.pop(name, None)

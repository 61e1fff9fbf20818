"""Which processes have fallen silent, from the signs of life seen so far. Pure: beats and time are passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Life:
    beat: int
    first: float
    last: float


@dataclass(slots=True)
class Pulse:
    """Ages are measured between the launcher's own looks, so no clock of another process matters."""

    stall_s: float
    _lives: dict[str, _Life] = field(default_factory=dict)

    def look(self, beats: Mapping[str, int], now: float) -> None:
        """Take in what ``heartbeat.last_beats`` said at ``now``."""
        for name, beat in beats.items():
            life = self._lives.get(name)
            if life is None:
                self._lives[name] = _Life(beat, now, now)
            elif life.beat != beat:
                life.beat, life.last = beat, now

    def silent(self, now: float) -> dict[str, float]:
        """Seconds of silence of those that have shown signs of life and then none for ``stall_s``."""
        return {name: now - life.last for name, life in self._lives.items() if now - life.last > self.stall_s}

    def worked_s(self, name: str) -> float | None:
        """From the first sign of life of ``name`` to its last; None where there was none."""
        life = self._lives.get(name)
        return None if life is None else life.last - life.first

    def forget(self, name: str) -> None:
        """``name`` ended: its next life begins with its next first beat."""
        self._lives.pop(name, None)

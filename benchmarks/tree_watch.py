"""Memory and CPU time of a process and all its descendants, sampled from another thread."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from run_times import CpuByProcess, Watcher, process_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """``at_s`` and ``cpu_s`` [n] are seconds since the start and CPU seconds of all processes until then.

    ``peak_bytes`` is the largest sum of proportional set sizes: memory that processes share counts once. ``by_name``
    are CPU seconds by process.
    """

    at_s: list[float]
    cpu_s: list[float]
    peak_bytes: int
    by_name: dict[str, float]

    def cores(self, first_s: float, last_s: float) -> float:
        """Mean number of busy cores between two times."""
        used = np.interp([first_s, last_s], self.at_s, self.cpu_s)
        return float(used[1] - used[0]) / (last_s - first_s)


@dataclass(slots=True)
class TreeWatch(Watcher):
    """Watches process ``root`` inside a ``with`` block; times count from ``started_s`` (monotonic)."""

    root: int
    started_s: float
    every_s: float = 1.0
    _cpu: CpuByProcess = field(default_factory=CpuByProcess)
    _at_s: list[float] = field(default_factory=list)
    _cpu_s: list[float] = field(default_factory=list)
    _peak: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(at_s=self._at_s, cpu_s=self._cpu_s, peak_bytes=self._peak, by_name=self._cpu.by_name())

    def _watch(self) -> None:
        while True:
            self._look()
            if self._stop.wait(self.every_s):
                return

    def _look(self) -> None:
        nbytes = 0
        for process in process_tree(self.root):
            with suppress(psutil.Error, OSError):
                self._cpu.read(process)
                nbytes += proportional_bytes(process.pid)
        self._peak = max(self._peak, nbytes)
        self._at_s.append(time.monotonic() - self.started_s)
        self._cpu_s.append(sum(self._cpu.by_name().values()))


def proportional_bytes(pid: int) -> int:
    """Proportional set size: a page that n processes share counts as a page / n. Raises OSError for ended ones."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0

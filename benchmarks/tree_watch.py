"""Memory and CPU time of a process and all its descendants, sampled from another thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil
from run_times import process_name, process_tree


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
class TreeWatch:
    """Watches process ``root`` inside a ``with`` block; times count from ``started_s`` (monotonic)."""

    root: int
    started_s: float
    every_s: float = 1.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _cpu: dict[tuple[int, float], tuple[str, float]] = field(default_factory=dict)
    _at_s: list[float] = field(default_factory=list)
    _cpu_s: list[float] = field(default_factory=list)
    _peak: int = 0
    _thread: threading.Thread | None = None

    def __enter__(self) -> TreeWatch:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def usage(self) -> Usage:
        by_name: Counter[str] = Counter()
        for name, used_s in self._cpu.values():
            by_name[name] += used_s
        return Usage(at_s=self._at_s, cpu_s=self._cpu_s, peak_bytes=self._peak, by_name=dict(by_name))

    def _watch(self) -> None:
        while True:
            self._look()
            if self._stop.wait(self.every_s):
                return

    def _look(self) -> None:
        nbytes = 0
        for process in process_tree(self.root):
            with suppress(psutil.Error, OSError):
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                # The name of a fork is its parent's until it has one of its own.
                self._cpu[key] = (process_name(process), times.user + times.system)
                nbytes += proportional_bytes(process.pid)
        self._peak = max(self._peak, nbytes)
        self._at_s.append(time.monotonic() - self.started_s)
        self._cpu_s.append(sum(used_s for _, used_s in self._cpu.values()))


def proportional_bytes(pid: int) -> int:
    """Proportional set size: a page that n processes share counts as a page / n. Raises OSError for ended ones."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0

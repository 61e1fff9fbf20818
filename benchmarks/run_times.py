"""Seconds and CPU seconds from the start of a launcher to the first finished training step.

Run ``python benchmarks/run_times.py`` for a table: the shipped example on this machine, ended after its first step.
Other benchmarks put a `StartWatch` around a launcher of their own.

CPU seconds add up over all processes of the run, also over those that have ended. On a machine with
fewer free cores than processes they decide the time; they hardly depend on what else runs.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from areal_lora.obs.metrics.reader import MetricsTail
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import read_statuses

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "math"
LOOK_S, CPU_EVERY = 0.05, 4
"""Seconds between two looks at the run folder; looks between two readings of CPU times."""
LONGEST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A status line of a process and when it was first seen, in seconds after the launcher's start."""

    process: str
    text: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """``first_step_s`` is None if the launcher ended before. ``cpu_s`` are CPU seconds by process until then."""

    first_step_s: float | None
    statuses: tuple[Status, ...]
    cpu_s: Mapping[str, float]

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


class Watcher:
    """Runs ``_watch`` in another thread during a ``with`` block; ``_stop`` is set at its end."""

    _stop: threading.Event
    _thread: threading.Thread

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        raise NotImplementedError


class CpuByProcess:
    """The newest CPU seconds of processes, also of those that have ended."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}

    def read(self, process: psutil.Process) -> None:
        used = process.cpu_times()
        # The name of a fork is its parent's until it has one of its own.
        self._seen[process.pid, process.create_time()] = process_name(process), used.user + used.system

    def by_name(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for name, used_s in self._seen.values():
            total[name] += used_s
        return dict(total)


@dataclass(slots=True)
class StartWatch(Watcher):
    """Watches a run from another thread until its first step; leaving the block waits for neither.

    ``started_s`` is ``time.monotonic()`` just before ``launcher`` was started. Example::

        started_s = time.monotonic()
        launcher = subprocess.Popen(command)
        with StartWatch(launcher.pid, folder, started_s) as watch:
            launcher.wait()
        print(watch.times.first_step_s)
    """

    launcher: int
    folder: RunFolder
    started_s: float
    first_step: threading.Event = field(default_factory=threading.Event)
    _statuses: list[Status] = field(default_factory=list)
    _cpu: CpuByProcess = field(default_factory=CpuByProcess)
    _first_step_s: float | None = None

    @property
    def times(self) -> StartTimes:
        cpu_s = self._cpu.by_name()
        return StartTimes(first_step_s=self._first_step_s, statuses=tuple(self._statuses), cpu_s=cpu_s)

    def _watch(self) -> None:
        tail = MetricsTail(self.folder)
        seen: dict[str, str] = {}
        looks = 0
        while not self._stop.wait(LOOK_S):
            now_s = time.monotonic() - self.started_s
            for process, text in read_statuses(self.folder).items():
                if seen.get(process) != text:
                    seen[process] = text
                    self._statuses.append(Status(process=process, text=text, at_s=now_s))
            done = any(isinstance(record, StepRecord) for record in tail.read_new())
            if done or looks % CPU_EVERY == 0:
                self._read_cpu()
            if done:
                self._first_step_s = now_s
                self.first_step.set()
                return
            looks += 1

    def _read_cpu(self) -> None:
        for process in process_tree(self.launcher):
            with suppress(psutil.Error), process.oneshot():
                self._cpu.read(process)


def process_tree(pid: int) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        launcher = psutil.Process(pid)
        yield launcher
        yield from launcher.children(recursive=True)


def process_name(process: psutil.Process) -> str:
    """``trainer-0``, ``server EngineCore``; all others by their module, such as ``rollout.main``."""
    command = process.cmdline()
    if command and command[0].startswith("VLLM::"):
        return f"server {command[0].removeprefix('VLLM::')}"
    module = next((b for a, b in pairwise(command) if a == "-m"), process.name())
    if module == "areal_lora.trainer.main":
        return f"trainer-{process.environ().get('RANK', '?')}"
    return module.removeprefix("areal_lora.")


def run_example(root: Path, overrides: tuple[str, ...]) -> StartTimes:
    """Start the shipped example below ``root`` and end it after its first step."""
    configs = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    command = [sys.executable, "-m", "areal_lora.launch", *(part for c in configs for part in ("--config", str(c)))]
    with tempfile.TemporaryDirectory(prefix="start", dir=root) as folder:
        started_s = time.monotonic()
        launcher = subprocess.Popen(
            [*command, f"run.root={folder}", *overrides], cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        run_folder = RunFolder(Path(folder) / "embedded")
        with StartWatch(launcher.pid, run_folder, started_s) as watch:
            while (
                launcher.poll() is None and not watch.first_step.is_set() and time.monotonic() - started_s < LONGEST_S
            ):
                watch.first_step.wait(LOOK_S)
            launcher.send_signal(signal.SIGINT)
            launcher.wait()
        return watch.times


def print_times(times: StartTimes) -> None:
    for status in times.statuses:
        print(f"{status.at_s:7.2f} s  {status.process:14} {status.text}")
    for name, used_s in sorted(times.cpu_s.items(), key=lambda item: -item[1]):
        if used_s >= 0.05:
            print(f"{used_s:7.2f} CPU s  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--root", type=Path, help="where run folders go (default: a temporary folder)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override one key of the configuration")
    arguments = parser.parse_args()
    found = []
    for _ in range(arguments.repeat):
        times = run_example(arguments.root, tuple(arguments.overrides))
        if times.first_step_s is None:
            print("error: the run ended before its first step", file=sys.stderr)
            return 1
        found.append(times)
        print_times(times)
        print(f"first_step_s {times.first_step_s:.1f}, CPU {times.total_cpu_s:.1f} s", flush=True)
    walls, cpus = [t.first_step_s or 0.0 for t in found], [t.total_cpu_s for t in found]
    for name, values in (("first_step_s", walls), ("CPU s", cpus)):
        print(f"{name}: min {min(values):.1f}, median {statistics.median(values):.1f}, max {max(values):.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

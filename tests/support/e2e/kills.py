"""Kill a process of a run once it has taken a step."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil

from tests.support.e2e.metrics import records


def kill_after(launcher: subprocess.Popen[bytes], folder: Path, step: int, module: str) -> None:
    """SIGKILL to the last process of ``module`` once ``step`` has been taken."""
    deadline = time.monotonic() + 280
    while not any(r["kind"] == "step" and r["step"] >= step for r in records(folder)):
        assert launcher.poll() is None, f"the run ended before step {step}"
        assert time.monotonic() < deadline, f"step {step} was not taken before {module} was to be killed"
        time.sleep(0.05)
    victims = [p for p in psutil.Process(launcher.pid).children() if runs(p, module)]
    victims[-1].kill()


def runs(process: psutil.Process, module: str) -> bool:
    """Whether ``module`` is a word of its command line; it may end meanwhile, and a zombie has none."""
    try:
        return module in process.cmdline()
    except psutil.NoSuchProcess:
        return False

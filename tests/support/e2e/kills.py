"""Kill a process of a run once it has taken a step."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil

from tests.support.e2e.metrics import records
from tests.support.forks import interpreter

SHIM = str(Path(interpreter.__file__))


def kill_after(launcher: subprocess.Popen[bytes], folder: Path, step: int, module: str) -> None:
    """SIGKILL to the last process of ``module``, of a run of `forked_roles`, once ``step`` has been taken."""
    deadline = time.monotonic() + 150
    while not any(r["kind"] == "step" and r["step"] >= step for r in records(folder)):
        assert launcher.poll() is None, f"the run ended before step {step}"
        assert time.monotonic() < deadline, f"step {step} was not taken before {module} was to be killed"
        time.sleep(0.05)
    shims = [p for p in psutil.process_iter() if runs(p, SHIM) and runs(p, module) and runs(p, str(folder))]
    shims[-1].kill()


def runs(process: psutil.Process, module: str) -> bool:
    """Whether ``module`` is a word of its command line; it may end meanwhile, and a zombie has none."""
    try:
        return module in process.cmdline()
    except psutil.NoSuchProcess:
        return False

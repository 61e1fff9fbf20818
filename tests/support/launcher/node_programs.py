"""Small programs as processes of a run on several nodes, which are agents on this machine (``driven``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.launcher.driven import Run

NODES = ["cluster.kind=nodes", "cluster.nodes=3", "cluster.bind=0.0.0.0"]
WAITS = "import time; print('works', flush=True); time.sleep(600)"
TERMED = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: (print('ends', flush=True), os._exit(0)))
print('works', flush=True)
time.sleep(600)
"""


def until(path: Path) -> str:
    """Code that ends well once ``path`` exists."""
    return f"import os, time\nprint('works', flush=True)\nwhile not os.path.exists({str(path)!r}): time.sleep(0.05)"


def works(run: Run, name: str, times: int = 1) -> Callable[[], bool]:
    return lambda: run.log(name).count("works") == times

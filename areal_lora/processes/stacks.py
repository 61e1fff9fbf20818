"""Stack dumps on demand: SIGUSR1 makes a process append the stacks of all its threads to a file.

Written by ``faulthandler`` inside the signal handler, so it works while the interpreter is stuck
in a C call such as a collective.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import IO

SIGNAL = signal.SIGUSR1

_open: list[IO[str]] = []


def install(path: Path) -> None:
    """Make this process append its stacks to ``path`` at SIGUSR1. Call it once, early."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Stays open: nothing can be opened when the process is stuck.
    file = path.open("a", encoding="utf-8")
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    _open.append(file)


def can_dump(pid: int) -> bool:
    """Whether ``pid`` has a handler for the signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (SIGNAL - 1) & 1)


def ask(pid: int) -> bool:
    """Ask ``pid`` for its stacks; False where it is gone or has no handler. The file is complete a moment later."""
    if not can_dump(pid):
        return False
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return False
    return True

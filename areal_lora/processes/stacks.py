"""Dump stacks: on SIGUSR1 to a file, and to the log when a fatal signal (SIGSEGV, SIGABRT, ...) ends the process.

``faulthandler`` writes inside the signal handler, so that a dump works while the interpreter is blocked in a C call
such as a collective.
"""

import faulthandler
import os
import signal
from pathlib import Path
from typing import IO

SIGNAL = signal.SIGUSR1


_open: list[IO[str]] = []


def install(path: Path) -> None:
    """Append the stacks of this process to ``path`` on SIGUSR1. Call once, early."""
    faulthandler.enable()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Stays open: a blocked process cannot open files.
    file = path.open("a", encoding="utf-8")
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    _open.append(file)


def can_dump(pid: int) -> bool:
    """Whether ``pid`` has a handler for SIGUSR1; without a handler the signal ends the process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (SIGNAL - 1) & 1)


def request(pid: int) -> bool:
    """Request the stacks of ``pid``; False if it has ended or has no handler. The file is complete a moment later."""
    if not can_dump(pid):
        return False
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return False
    return True

"""Ends the processes of a run whose launcher was itself killed (SIGKILL, out of memory).

Reads from standard input, one a line: process ids, and after ``shm:`` names of shared memory that
they use. The end of the input without a last line ``done`` means that the launcher is gone:
those processes are asked to end, whatever is still alive in their sessions after that is killed, and their
shared memory removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

from areal_lora.launcher import shared_memory

DONE, SHARED = "done", "shm:"
GRACE_S = 5.0
"""For the processes to end by themselves after SIGTERM."""


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    before = shared_memory.entries()
    lines = sys.stdin.read().splitlines()
    if lines[-1:] == [DONE]:
        return 0
    shared = {line.removeprefix(SHARED) for line in lines if line.startswith(SHARED)}
    sessions = {int(line) for line in lines if not line.startswith(SHARED)}
    # Only what the launcher started is asked: it knows in which order its own children must go.
    _signal(sessions.intersection(members_of(sessions)), signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while (members := members_of(sessions)) and time.monotonic() < deadline:
        shared |= shared_memory.used_by(members) - before
        time.sleep(0.1)
    while members := members_of(sessions):
        _signal(members, signal.SIGKILL)
        time.sleep(0.05)
    shared_memory.remove(shared)
    return 0


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def members_of(sessions: set[int]) -> list[int]:
    """Living processes of ``sessions`` (a session's id is the id of the process that began it)."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members


if __name__ == "__main__":
    sys.exit(main())

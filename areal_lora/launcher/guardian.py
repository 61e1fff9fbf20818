"""Ends the processes of a run whose launcher was itself killed (SIGKILL, out of memory).

Reads process ids from standard input, one a line. The end of the input without a last line
``done`` means that the launcher is gone: whatever is still alive in the sessions of those
processes is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil

DONE = "done"
GRACE_S = 3.0


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().split()
    if lines[-1:] == [DONE]:
        return 0
    sessions = {int(line) for line in lines}
    deadline = time.monotonic() + GRACE_S
    while members_of(sessions) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in members_of(sessions):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return 0


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

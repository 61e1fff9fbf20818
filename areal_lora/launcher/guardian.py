"""Ends the processes of a run whose launcher was itself killed (SIGKILL, out of memory): ``guardian MARK``.

Reads from standard input, one a line: process ids, and after ``shm:`` names of shared memory that they use. The end of
the input without a last line ``done`` means that the launcher has ended: those processes get SIGTERM, what is still
alive in their sessions after that is killed, and their shared memory removed. A launcher may die between the start of a
process and the line with its id, so processes with ``MARK`` in their environment are ended as well.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

from areal_lora.processes import shared_memory

DONE, SHARED = "done", "shm:"
MARK = "AREAL_LORA_LAUNCHER"
"""Variable in the environment of all that a launcher starts; its value is the launcher's own."""
GRACE_S = 5.0
"""For the processes to end by themselves after SIGTERM."""
START_S = 1.0
"""A process that was being started when the launcher died has its environment after at most so long."""


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    before = shared_memory.entries()
    lines = sys.stdin.read().splitlines()
    if lines[-1:] == [DONE]:
        return 0
    shared = {line.removeprefix(SHARED) for line in lines if line.startswith(SHARED)}
    sessions = {int(line) for line in lines if not line.startswith(SHARED)}
    signalled = set[int]()
    ended_s = time.monotonic()
    while (members := members_of(sessions)) or time.monotonic() < ended_s + START_S:
        if time.monotonic() > ended_s + GRACE_S:
            break
        # Only what the launcher started gets it: it knows in which order its own children must go.
        signal_all(sessions.intersection(members) - signalled, signal.SIGTERM)
        signalled |= sessions.intersection(members)
        shared |= shared_memory.used_by(members) - before
        time.sleep(0.1)
        sessions |= sessions_with(sys.argv[1])
    while members := members_of(sessions):
        signal_all(members, signal.SIGKILL)
        time.sleep(0.05)
    shared_memory.remove(shared)
    return 0


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def members_of(sessions: set[int]) -> list[int]:
    """Living processes of ``sessions`` (a session's id is the id of the process that started it)."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members


def sessions_with(mark: str) -> set[int]:
    """Sessions of the processes that were started with ``mark`` in their environment."""
    sessions = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.environ().get(MARK) == mark:
                sessions.add(os.getsid(process.pid))
    return sessions


if __name__ == "__main__":
    sys.exit(main())

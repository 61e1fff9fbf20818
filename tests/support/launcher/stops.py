"""The five ways a run is stopped, and how to verify that nothing of it remains."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.cli.command import command_starter
from tests.support.forks.starter import Fork

WAYS = ("Ctrl-C", "Ctrl-C twice", "SIGTERM", "SIGHUP", "launcher killed")
GONE_S = 80.0
"""What no one ends lives for ten minutes (``stage``); what a launcher ends, for its grace and a busy machine's time."""
SHARED = Path("/dev/shm")


def stop(process: Fork, way: str) -> None:
    number = {
        "Ctrl-C": signal.SIGINT,
        "Ctrl-C twice": signal.SIGINT,
        "SIGTERM": signal.SIGTERM,
        "SIGHUP": signal.SIGHUP,
        "launcher killed": signal.SIGKILL,
    }[way]
    process.send_signal(number)
    if way == "Ctrl-C twice":
        time.sleep(0.3)
        process.send_signal(number)


@dataclass
class Held:
    """What a run holds at one moment: processes with its mark, their ports, their shared memory."""

    processes: list[psutil.Process]
    listeners: set[tuple[int, int]] = field(default_factory=set)  # with the inode: others may take a port that is free
    shared: set[str] = field(default_factory=set)

    @property
    def ports(self) -> set[int]:
        return {port for port, _ in self.listeners}

    @classmethod
    def by(cls, environment: Mapping[str, str]) -> Held:
        held = cls(marked(environment))
        for process in held.processes:
            try:
                inodes = sockets_of(process.pid)
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
            held.listeners |= {listener for listener in listening() if listener[1] in inodes}
            files = {line.split()[4] for line in maps if f" {SHARED}/" in line}  # a semaphore's path is another one
            for path in SHARED.iterdir():
                with suppress(FileNotFoundError):
                    held.shared |= {path.name} if str(path.stat().st_ino) in files else set()
        return held

    def left(self, environment: Mapping[str, str]) -> list[str]:
        """What is still there, in words; processes also by a mark in their environment."""
        alive = {p.pid: p for p in self.processes if is_alive(p)}
        alive |= {p.pid: p for p in marked(environment)}
        words = [f"process {p.pid} {words_of(p)}" for p in alive.values()]
        words += [f"port {port}" for port, _ in sorted(self.listeners & listening())]
        return words + [f"shared memory {name}" for name in self.shared if (SHARED / name).exists()]

    def gone_after_s(self, environment: Mapping[str, str], began_s: float) -> float:
        """Seconds since ``began_s`` until nothing remains; fails after ``GONE_S``."""
        while left := self.left(environment):
            assert time.monotonic() - began_s < GONE_S, f"left after {GONE_S:.0f} s: {left}"
            time.sleep(0.1)
        return time.monotonic() - began_s


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; it may end while it is looked at."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def words_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.NoSuchProcess:
        return "(just ended)"


def marked(environment: Mapping[str, str]) -> list[psutil.Process]:
    """Living processes that carry ``environment``: also those that no parent knows any more."""
    found = []
    for process in psutil.process_iter():
        try:
            own = process.environ()
            if own.items() >= environment.items() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def sockets_of(pid: int) -> set[int]:
    """Inodes of the sockets that a process has open. Raises OSError if it has ended."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = str(descriptor.readlink()).partition(":")
            found |= {int(inode.strip("[]"))} if kind == "socket" else set()
    return found


def listening() -> set[tuple[int, int]]:
    """Port and inode of every listener of this machine. Connections that linger do not count."""
    lines = [line for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    rows = [line.split() for line in lines]
    return {(int(row[1].rpartition(":")[2], 16), int(row[9])) for row in rows if row[3] == "0A"}


def figures(seconds: Iterable[float]) -> str:
    values = sorted(seconds)
    return f"min {values[0]:.2f} s, p50 {statistics.median(values):.2f} s, max {values[-1]:.2f} s of {len(values)}"


def start(module: str, arguments: list[str], environment: Mapping[str, str], output: Path) -> Fork:
    with output.open("wb") as file:
        return command_starter().start(module, arguments, os.environ | environment, file)

"""Find the processes of a run on this machine, and the launcher that holds its folder. Writes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil

from areal_lora.run_folder.paths import RunFolder

LOCKS = Path("/proc/locks")
ROLES = {
    "areal_lora.trainer.main": "trainer",
    "areal_lora.rollout.main": "controller",
    "areal_lora.service.main": "service",
    "areal_lora.engine.vllm_ext.server.main": "server",
}
_LOCK = re.compile(r"^\d+: (?:FLOCK|OFDLCK|POSIX)\s+ADVISORY\s+WRITE (-?\d+) [0-9a-f]+:[0-9a-f]+:(\d+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The launcher that holds a run folder. ``pid`` is a process of this machine if ``here``."""

    pid: int
    host: str
    here: bool


def holder(folder: RunFolder) -> Holder | None:
    """The launcher of this machine that holds ``folder``, or the one that its mark names; None where none is known."""
    with contextlib.suppress(FileNotFoundError):
        inode = folder.lock.stat().st_ino
        for pid in lock_holders(LOCKS.read_text(encoding="ascii"), inode):
            if pid > 0 and psutil.pid_exists(pid):
                return Holder(pid=pid, host=os.uname().nodename, here=True)
    return _marked(folder)


def is_free(folder: RunFolder) -> bool:
    """Whether no launcher of any machine holds the lock; False where that cannot be found out.

    Takes the lock for a moment: call it only where a launcher is not likely to start.
    """
    with contextlib.suppress(OSError), folder.lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def lock_holders(locks: str, inode: int) -> list[int]:
    """Processes that hold a lock of the file ``inode``, from the text of /proc/locks."""
    return [int(pid) for pid, number in _LOCK.findall(locks) if int(number) == inode]


def _marked(folder: RunFolder) -> Holder | None:
    """The owner that a file names on file systems without flock."""
    from areal_lora.launcher.start import Owner

    try:
        owner = msgspec.json.decode(folder.owner.read_bytes(), type=Owner)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    here = owner.host == os.uname().nodename
    return None if owner.is_over() else Holder(pid=owner.pid, host=owner.host, here=here)


def local_processes(folder: RunFolder) -> dict[str, int]:
    """``{"trainer-0": process id, ...}`` of the run's processes on this machine, found by their command lines."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "--run-folder" not in command or process.status() == psutil.STATUS_ZOMBIE:
                continue
            options = dict(pairwise(command))
            role = ROLES.get(options.get("-m", ""))
            if role is not None and _same(options["--run-folder"], folder):
                index = options.get("--index") or (process.environ().get("RANK", "0") if role == "trainer" else "0")
                found[f"{role}-{index}"] = process.pid
    return found


def _same(path: str, folder: RunFolder) -> bool:
    with contextlib.suppress(OSError):
        return Path(path).samefile(folder.path)
    return False


def descendants(pid: int) -> Iterator[str]:
    """Names of the run's processes below ``pid`` that are alive, for a line about what a stop waits for."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                role = next((ROLES[word] for word in words if word in ROLES), None)
                if role is not None and child.status() != psutil.STATUS_ZOMBIE:
                    yield f"{role} {child.pid}"

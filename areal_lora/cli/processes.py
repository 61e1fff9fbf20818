"""Find the processes of a run on this machine. Writes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from itertools import pairwise

import psutil

from areal_lora.run_folder.paths import RunFolder

ROLES = {
    "areal_lora.trainer.main": "trainer",
    "areal_lora.rollout.main": "controller",
    "areal_lora.service.main": "service",
    "areal_lora.engine.vllm_ext.server.main": "server",
}


def is_free(folder: RunFolder) -> bool:
    """Whether no launcher of any machine holds the lock; False where that cannot be found out.

    Takes the lock for a moment: call it only where a launcher is not likely to start.
    """
    with contextlib.suppress(OSError), folder.lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


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
            if role is not None and os.path.realpath(options["--run-folder"]) == os.path.realpath(folder):
                index = options.get("--index") or (process.environ().get("RANK", "0") if role == "trainer" else "0")
                found[f"{role}-{index}"] = process.pid
    return found


def descendants(pid: int) -> Iterator[str]:
    """Names of the run's processes below ``pid`` that are alive, for a line about what a stop waits for."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                role = next((ROLES[word] for word in words if word in ROLES), None)
                if role is not None and child.status() != psutil.STATUS_ZOMBIE:
                    yield f"{role} {child.pid}"

"""What a process sets up at its start: log, stacks on demand, devices; and the shared memory of processes.

On SIGUSR1 a process appends the stacks of all its threads to a file: ``faulthandler`` writes inside the signal handler,
also while the interpreter is blocked in a C call such as a collective.

The plan numbers the devices of a node from 0. What Slurm or the user's environment gives may be 4,5,6,7 or UUIDs, so a
number of the plan is a position in the inherited list.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from areal_lora.errors import ConfigError

ROOT = "areal_lora"


class _Formatter(logging.Formatter):
    """``12:04:31.208 trainer-0 INFO name: message``; line breaks in a message are escaped.

    Messages can hold model output; escaping prevents forged records. Traceback lines follow the record, indented.
    """

    def __init__(self, process: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        name = record.name.removeprefix(f"{ROOT}.")
        when = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        line = f"{when} {self._process} {record.levelname} {name}: {text}"
        if record.exc_info:
            line += "".join(f"\n    {row}" for row in self.formatException(record.exc_info).splitlines())
        return line


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``. Names outside the package become its children."""
    inside = name == ROOT or name.startswith(f"{ROOT}.")
    return logging.getLogger(name if inside else f"{ROOT}.{name.strip('_')}")


def setup_logging(role: str, index: int | None = None, level: int = logging.INFO) -> None:
    """Log the package's records to stderr with the tag ``role-index``. A second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(role if index is None else f"{role}-{index}"))
    logger = logging.getLogger(ROOT)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


SIGNAL = signal.SIGUSR1

_open: list[IO[str]] = []


def install(path: Path) -> None:
    """Append the stacks of this process to ``path`` on SIGUSR1. Call once, early."""
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


_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals) -> None:
    """Have the kernel send ``sig`` to this process when its parent ends in any way. A fork does not inherit this."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage in the block, which imports large libraries. For the main function of a process.

    Imports make a million objects that stay, and the collector would look through all of them again and again: up to a
    fifth of the CPU time. What exists at the end is never collected (``gc.freeze``).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


DEVICES_VARIABLE = "AREAL_LORA_DEVICES"
"""Numbers of the process's devices on its node, set by the launcher."""
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable that a device's runtime reads when it is initialised."""


def take_devices(device: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make only the plan's devices visible to this process, before it uses them. Raises ConfigError for too few."""
    chosen = environment.get(DEVICES_VARIABLE)
    if chosen is None or device not in VISIBLE:
        return
    variable, numbers = VISIBLE[device], [int(number) for number in chosen.split(",")]
    inherited = environment.get(variable)
    if inherited is not None:
        given = [name.strip() for name in inherited.split(",") if name.strip()]
        if max(numbers) >= len(given):
            raise ConfigError(
                variable,
                f"the plan uses device number {max(numbers)} (counted from 0) of this node, and {inherited!r} "
                f"gives {len(given)}",
                "give as many devices as cluster.devices_per_node, or lower that",
            )
        chosen = ",".join(given[number] for number in numbers)
    environment[variable] = chosen
    del environment[DEVICES_VARIABLE]


FOLDER = Path("/dev/shm")


def entries() -> set[str]:
    """Names of everything there is now."""
    return {p.name for p in FOLDER.iterdir() if p.is_file()} if FOLDER.is_dir() else set()


def used_by(pids: Iterable[int]) -> set[str]:
    """Names of what one of ``pids`` has open or mapped.

    Found by inode: a semaphore is mapped under another name than it has, because glibc makes it under a
    temporary one and then links it.
    """
    inodes, found = {inode for pid in pids for inode in _inodes(pid)}, set()
    for name in entries():
        with suppress(FileNotFoundError):
            if (FOLDER / name).stat().st_ino in inodes:
                found.add(name)
    return found


def _inodes(pid: int) -> Iterator[int]:
    prefix = f"{FOLDER}/"
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if prefix in line:
                yield int(line.split(maxsplit=5)[4])
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(fd).startswith(prefix):
                yield fd.stat().st_ino
    except OSError:
        return  # it ended while we looked, or is not ours to look at


def remove(names: Iterable[str]) -> None:
    for name in names:
        (FOLDER / name).unlink(missing_ok=True)

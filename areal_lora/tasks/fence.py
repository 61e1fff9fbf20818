"""Restrict a scorer process, whatever its reward function does.

seccomp (:mod:`areal_lora.tasks.seccomp`) refuses other processes, signals to them, and sockets. Landlock refuses
writes to files, and reads of the run folder with its secret. As root, the process keeps only the capability to read
files. Both work without privileges and in containers. If the kernel lacks one of them, :func:`raise_fence` reports
it, and Python's audit hook still refuses sockets and processes that Python code requests. The scorer process itself
limits memory and CPU time per answer.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from areal_lora.tasks import seccomp

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 38, 24
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAP_DAC_READ_SEARCH = 2

# Landlock (the numbers are the same on every machine): access rights by the ABI version that introduced them.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}

_NETWORK = "a reward has no network"
_PROCESSES = "a reward may not start or touch other processes"
_FORBIDDEN = {
    "socket.__new__": _NETWORK,
    "socket.connect": _NETWORK,
    "socket.bind": _NETWORK,
    "socket.getaddrinfo": _NETWORK,
    "socket.gethostbyname": _NETWORK,
    "os.fork": _PROCESSES,
    "os.forkpty": _PROCESSES,
    "os.posix_spawn": _PROCESSES,
    "os.exec": _PROCESSES,
    "os.system": _PROCESSES,
    "subprocess.Popen": _PROCESSES,
}


def raise_fence(hidden: Path | None, parent_pid: int) -> list[str]:
    """Restrict this process permanently; it must have one thread. Returns the protections that this machine lacks.

    The process cannot read the folder ``hidden`` afterwards. It ends with its parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # the parent ended before prctl
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    missing = []
    if not _forbid_files(libc, hidden):
        missing.append("Landlock (Linux 5.13; the reward can read the run folder, as the user can)")
    _drop_capabilities(libc)
    if not seccomp.install():
        missing.append("seccomp filters (native code can open sockets and start processes)")
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    forbid_in_python()
    return missing


def forbid_in_python() -> None:
    """Add an audit hook that refuses sockets and processes with a clear message. A hook cannot be removed."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _FORBIDDEN and not (event == "socket.__new__" and arguments[1:2] == (1,)):
            raise PermissionError(_FORBIDDEN[event])

    sys.addaudithook(hook)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities but one: reading files of other users, which may own code and data."""
    number = _SYS_CAPSET.get(os.uname().machine)
    if number is None:
        return
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    kept = 1 << _CAP_DAC_READ_SEARCH
    if libc.syscall(number, header, struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
        libc.syscall(number, header, struct.pack("6I", 0, 0, 0, 0, 0, 0))  # the process had no such capability


def _forbid_files(libc: ctypes.CDLL, hidden: Path | None) -> bool:
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    rights = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    ruleset = libc.syscall(_CREATE_RULESET, struct.pack("Q", rights), 8, 0)
    if ruleset < 0:
        return False
    try:
        _allow(libc, ruleset, Path("/"), _READ_DIR)
        for place in _all_but(hidden):
            _allow(libc, ruleset, place, _READ_FILE)
        _allow(libc, ruleset, Path("/dev/null"), _WRITE_FILE)
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _all_but(hidden: Path | None) -> Iterator[Path]:
    """Yield paths that cover all existing files except those below ``hidden``; Landlock rules can only allow."""
    if hidden is None:
        yield Path("/")
        return
    hidden = hidden.resolve()
    for on_the_way, folder in pairwise((hidden, *hidden.parents)):
        yield from (entry for entry in folder.iterdir() if entry != on_the_way and not entry.is_symlink())


def _allow(libc: ctypes.CDLL, ruleset: int, place: Path, rights: int) -> None:
    try:
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # removed since it was listed, or not permitted for this user
    try:
        libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)

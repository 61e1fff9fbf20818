"""Restrict a scorer process, whatever its reward function does.

:mod:`areal_lora.tasks.sandbox.seccomp` refuses other processes, signals to them, and sockets, unless `Doors` allow
them. Landlock refuses writes to files, and reads of the run folder with its secret, or of all files but those that
`Doors` list. As root, the process keeps only the capability to read files. Both work without privileges and in
containers. If the kernel lacks one of them, :func:`raise_fence` reports it, and Python's audit hook still refuses
sockets and processes that Python code requests. The scorer process itself limits memory and CPU time per answer.

A scorer process that may start others runs inside bubblewrap where that works (`boxed`). A POSIX timer limits the
time of an answer (`Deadline`).
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec

from areal_lora.processes.startup import die_with_parent
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.sandbox import seccomp

_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 38, 24
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _AMBIENT_RAISE = 8, 47, 2
_CAP_DAC_READ_SEARCH = 2
MORE_PROCESSES = 64
FIRST_USER, USERS = 64000, 1000

# Landlock (the numbers are the same on every machine): access rights by the ABI version that introduced them.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_SIGNALS_SINCE, _SCOPE_SIGNAL = 6, 1 << 1
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}

_NETWORK = "a reward has no network (fix: set reward.network=true)"
_PROCESSES = "a reward may not start or touch other processes (fix: set reward.allow_subprocess=true)"
_SOCKETS = ("socket.__new__", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname")
_STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "subprocess.Popen")


class Doors(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward may do: write files of up to ``scratch_bytes`` in the folder ``scratch``, and open sockets.

    ``hidden`` is a folder whose content may not be read, but in the folder ``kept`` inside it may be read and written.
    ``processes`` may be started. ``readable``: the only files and folders that may be read and executed; None: all
    outside the hidden one.
    """

    hidden: str | None = None
    scratch: str | None = None
    scratch_bytes: int = 0
    network: bool = False
    kept: str | None = None
    processes: seccomp.ProcessPolicy = seccomp.ProcessPolicy.NONE
    readable: tuple[str, ...] | None = None


def raise_fence(doors: Doors, parent_pid: int) -> list[str]:
    """Restrict this process permanently; it must have one thread. Returns the protections that this machine lacks.

    It ends with its parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # the parent ended before prctl
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (doors.scratch_bytes, doors.scratch_bytes))
    missing = []
    if not _forbid_files(libc, doors):
        missing.append("Landlock (Linux 5.13; the reward can read the run folder, as the user can)")
    if doors.processes is seccomp.ProcessPolicy.MANY and _landlock(libc) < _SIGNALS_SINCE:
        missing.append("Landlock's scope of signals (Linux 6.12; the reward can signal other processes of the user)")
    inherited = doors.processes is not seccomp.ProcessPolicy.NONE
    _drop_capabilities(libc, inherited=inherited)
    if doors.processes is seccomp.ProcessPolicy.MANY and os.geteuid() == 0 and not _become_another_user(doors.scratch):
        missing.append("a user of its own (the number of processes is limited by the time of an answer alone)")
    # Landlock binds capabilities too. The interpreter may be in a folder that only its owner may enter.
    if doors.readable is not None and all(
        os.access(place, os.R_OK) for place in doors.readable if os.path.exists(place)
    ):
        _set_capabilities(libc, 0, inherited=False)
    else:
        _set_capabilities(libc, 1 << _CAP_DAC_READ_SEARCH, inherited=inherited)
    die_with_parent(signal.SIGKILL)  # a change of the user has forgotten it
    if not seccomp.install(network=doors.network, processes=doors.processes):
        missing.append("seccomp filters (native code can open sockets and start processes)")
        if not doors.processes.several:
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    forbid_in_python(network=doors.network, processes=doors.processes.several)
    return missing


def forbid_in_python(*, network: bool = False, processes: bool = False) -> None:
    """Add an audit hook that refuses sockets and processes with a clear message. A hook cannot be removed."""
    forbidden = {} if network else dict.fromkeys(_SOCKETS, _NETWORK)
    forbidden |= {} if processes else dict.fromkeys(_STARTS, _PROCESSES)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in forbidden and not (event == "socket.__new__" and arguments[1:2] == (1,)):
            raise PermissionError(forbidden[event])

    sys.addaudithook(hook)


def _drop_capabilities(libc: ctypes.CDLL, *, inherited: bool) -> None:
    """Let no program that this process becomes have capabilities, or only the one to read files."""
    for capability in range(64):
        if inherited and capability == _CAP_DAC_READ_SEARCH:
            continue  # it can be handed on only while it is in this set
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def _set_capabilities(libc: ctypes.CDLL, kept: int, *, inherited: bool) -> None:
    """Drop all capabilities but those of the mask ``kept``; without them if the process has not had them.

    ``inherited``: programs that this process becomes or starts have them too.
    """
    number = _SYS_CAPSET.get(os.uname().machine)
    if number is None:
        return
    header = struct.pack("Ii", 0x20080522, 0)
    handed_on = kept if inherited else 0
    if libc.syscall(number, header, struct.pack("6I", kept, kept, handed_on, 0, 0, 0)) != 0:
        libc.syscall(number, header, struct.pack("6I", 0, 0, 0, 0, 0, 0))
    elif handed_on:
        libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0)


def _become_another_user(scratch: str | None) -> bool:
    """Leave root, whose processes the kernel neither counts nor protects; False if that is not possible here."""
    user = FIRST_USER + os.getpid() % USERS
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    try:
        if scratch is not None:
            os.chown(scratch, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:
        return False
    return True


def count_threads() -> int:
    """Threads of all processes of this user, which the kernel's limit of processes counts."""
    user, now = os.getuid(), 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            found = os.stat(f"/proc/{name}/task")  # its links are two more than its threads
            now += found.st_nlink - 2 if found.st_uid == user else 0
    return now


def limit_processes(now: int, *, for_good: bool) -> None:
    """Let this user have `MORE_PROCESSES` more processes and threads than ``now``: others of the user count, too.

    Without ``for_good`` the limit can be renewed.
    """
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    limit = now + MORE_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, now + MORE_PROCESSES)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit if for_good else hard))


def _landlock(libc: ctypes.CDLL) -> int:
    """Version of the kernel's Landlock, below 1 if it has none."""
    version: int = libc.syscall(_CREATE_RULESET, None, 0, 1)
    return version


def _forbid_files(libc: ctypes.CDLL, doors: Doors) -> bool:
    version = _landlock(libc)
    if version < 1:
        return False
    rights = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    attributes = struct.pack("Q", rights)
    if doors.processes.several and version >= _SIGNALS_SINCE:
        attributes = struct.pack("QQQ", rights, 0, _SCOPE_SIGNAL)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        read = _READ_FILE if doors.processes is seccomp.ProcessPolicy.NONE else _READ_FILE | _EXECUTE
        if doors.readable is None:
            _allow(libc, ruleset, Path("/"), _READ_DIR)
        for place in _all_but(doors.hidden) if doors.readable is None else map(Path, doors.readable):
            _allow(libc, ruleset, place, read | _READ_DIR if place.is_dir() else read)
        _allow(libc, ruleset, Path("/dev/null"), _WRITE_FILE)
        for folder in (doors.scratch, doors.kept):
            if folder is not None:
                _allow(libc, ruleset, Path(folder), rights)
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _all_but(folder: str | None) -> Iterator[Path]:
    """Yield paths that cover all existing files except those of the run ``folder``, which may hold the reward.

    Landlock rules can only allow.
    """
    if folder is None:
        yield Path("/")
        return
    hidden = Path(folder).resolve()
    for on_the_way, above in pairwise((hidden, *hidden.parents)):
        yield from (entry for entry in above.iterdir() if entry != on_the_way and not entry.is_symlink())
    yield RunFolder(hidden).code


def _allow(libc: ctypes.CDLL, ruleset: int, place: Path, rights: int) -> None:
    try:
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # removed since it was listed, or not permitted for this user
    try:
        libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


PROBE_S = 10.0
PARENT_PID = 1  # parent of the boxed process, as it sees it


def boxed(argv: Sequence[str], *, network: bool, hidden: str | None, scratch: str | None) -> list[str] | None:
    """``argv`` inside bubblewrap, without the content of ``hidden``; None where it is not installed or not usable.

    It has process ids, IPC and network of its own, and all files are read-only. All of its processes end with it. Of
    ``hidden``, a run folder, the folder with the user's own code stays visible.
    """
    tool = shutil.which("bwrap")
    if tool is None or is_root() or not usable(tool):
        return None
    arguments = _arguments(network=network)
    if hidden is not None and os.path.isdir(hidden):
        code = str(RunFolder(Path(hidden)).code)
        arguments += ["--tmpfs", hidden, "--ro-bind-try", code, code]
    if scratch is not None:
        arguments += ["--bind", scratch, scratch]
    return [tool, *arguments, "--", *argv]


def is_root() -> bool:
    """Whether the kernel would not limit the number of processes inside: then the fence changes the user instead."""
    return os.geteuid() == 0


@cache
def usable(tool: str) -> bool:
    """Whether this user may make namespaces here; many containers forbid it."""
    try:
        tried = subprocess.run(
            [tool, *_arguments(network=False), "--", "/bin/true"], capture_output=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _arguments(*, network: bool) -> list[str]:
    alone = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    if not network:
        alone.append("--unshare-net")
    return [*alone, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]


# Numbers of timer_create and timer_settime: their names in the C library differ between versions.
_CALLS = {"x86_64": (222, 223), "aarch64": (107, 110)}
_CLOCK_MONOTONIC, _SIGEV_SIGNAL = 1, 0


class Deadline:
    """End this process by SIGKILL if more than the allowed seconds pass between ``start`` and ``stop``.

    Neither user code that hangs in C with all signals blocked nor a stopped parent delays it.
    """

    def __init__(self) -> None:
        """Create the timer. ``kept`` is False on a machine without such timers."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_int()
        create, self._set = _CALLS.get(os.uname().machine, (-1, -1))
        event = struct.pack("qii48x", 0, signal.SIGKILL, _SIGEV_SIGNAL)
        self.kept = self._libc.syscall(create, _CLOCK_MONOTONIC, event, ctypes.byref(self._timer)) == 0
        self._off = struct.pack("qqqq", 0, 0, 0, 0)

    def start(self, seconds: float) -> None:
        whole = int(seconds)
        self._settime(struct.pack("qqqq", 0, 0, whole, max(1, int((seconds - whole) * 1e9))))

    def stop(self) -> None:
        self._settime(self._off)

    def _settime(self, value: bytes) -> None:
        if self.kept:
            self._libc.syscall(self._set, self._timer, 0, value, None)

"""System call filter for one process: it refuses other processes, sockets and changes that outlive the process.

The filter needs no privilege and works inside containers. A refused call fails with EPERM, which a reward
receives as an ordinary PermissionError. Threads inherit the filter, and it cannot be removed.
"""

import ctypes
import errno
import os
import struct
import sys
from enum import StrEnum

# Numbers on (x86_64, aarch64); None if the machine has no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes: starting, signalling, tracing
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # network: sockets exist only in pairs
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    # memory that RLIMIT_AS does not count, or that outlives the process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    # changes to files that Landlock does not see
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "open_by_handle_at": (304, 265),
    # the system
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
_CLONE = (56, 220)  # allowed for threads
_STARTS = ("fork", "vfork", "execve", "execveat")
_ATTRIBUTES = ("chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "futimesat", "utimensat")
_CLONE3 = (435, 435)  # its flags cannot be read by a filter; "no such call" makes the C library use clone
_OWN_PID_ONLY = {"kill": (62, 129), "tgkill": (234, 131)}
_SELF_ONLY = (302, 261)  # prlimit64 of process 0, which means itself

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data; the low half of argument 0
_PR_SET_SECCOMP, _FILTER_MODE = 22, 2

Instruction = tuple[int, int, int, int]


class ProcessPolicy(StrEnum):
    """Which processes may be started.

    ``none``: no other one. ``exec``: none, but this one may become another program. ``many``: any, which can be
    signalled too and stay in the process group; in a ``box`` of its own they may also change attributes of files.
    """

    NONE = "none"
    EXEC = "exec"
    MANY = "many"
    BOX = "box"

    @property
    def several(self) -> bool:
        return self in (ProcessPolicy.MANY, ProcessPolicy.BOX)


def program(
    machine: str, pid: int, *, network: bool = False, processes: ProcessPolicy = ProcessPolicy.NONE
) -> list[Instruction] | None:
    """Build the filter as BPF ``(code, jump if true, jump if false, k)``; None for a machine without known numbers."""
    if machine not in _MACHINES:
        return None
    column, arch = _MACHINES[machine]
    open_calls = {"socket"} if network else set()
    open_calls |= {"execve"} if processes is ProcessPolicy.EXEC else set()
    open_calls |= {*_STARTS, "tkill"} if processes.several else set()
    open_calls |= set(_ATTRIBUTES) if processes is ProcessPolicy.BOX else set()
    refuse: Instruction = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_JGE, 0, 1, _X32),
        refuse,
    ]
    for name, numbers in REFUSED.items():
        if name in open_calls:
            continue
        number = numbers[column]
        if number is not None:
            code += [(_JEQ, 0, 1, number), refuse]
    code += [(_JEQ, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    code += [(_JEQ, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _ARG0)]
    if processes.several:
        code += [(_JSET, 0, 1, _CLONE_NAMESPACES), refuse, allow]
    else:
        code += [(_JSET, 1, 0, _CLONE_THREAD), refuse, allow]
    own_pid = [] if processes.several else [(numbers, pid) for numbers in _OWN_PID_ONLY.values()]
    for numbers, wanted in [*own_pid, (_SELF_ONLY, 0)]:
        code += [(_JEQ, 0, 4, numbers[column]), (_LOAD, 0, 0, _ARG0), (_JEQ, 1, 0, wanted), refuse, allow]
    return [*code, allow]


def install(*, network: bool = False, processes: ProcessPolicy = ProcessPolicy.NONE) -> bool:
    """Install the filter in this process; False if the kernel or machine does not support it.

    The process must have one thread and PR_SET_NO_NEW_PRIVS set.
    """
    code = program(os.uname().machine, os.getpid(), network=network, processes=processes)
    if code is None or sys.maxsize < 2**32:
        return False
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed)
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.create_string_buffer(header), 0, 0)
    return result == 0

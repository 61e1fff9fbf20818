"""Run a program on file systems without locks: ``python no_locks.py flock|all ENOSYS|... COMMAND...``.

The kernel itself refuses the calls (a seccomp filter, inherited by all children): ``flock``, and with ``all`` also the
POSIX locks of ``fcntl``, as SQLite takes them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

FLOCK, FCNTL = {"x86_64": (73, 72), "aarch64": (32, 25)}[os.uname().machine]
LOCK_COMMANDS = (5, 6, 7, 36, 37, 38)  # F_GETLK, F_SETLK, F_SETLKW and those of open file descriptions
LOAD, JEQ, RETURN, ALLOW, ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
NUMBER, COMMAND = 0, 24  # offsets in struct seccomp_data


def refuse(what: str, code: int) -> None:
    refused = (RETURN, 0, 0, ERRNO | code)
    program = [(LOAD, 0, 0, NUMBER), (JEQ, 0, 1, FLOCK), refused]
    if what == "all":
        program += [(JEQ, 1, 0, FCNTL), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, COMMAND)]
        for command in LOCK_COMMANDS:
            program += [(JEQ, 0, 1, command), refused]
    program.append((RETURN, 0, 0, ALLOW))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(seccomp, filter_mode, ctypes.create_string_buffer(header), 0, 0) == 0, ctypes.get_errno()


if __name__ == "__main__":
    refuse(sys.argv[1], getattr(errno, sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])

"""The process that is forked: ``python -m tests.support.forks.parent PRELOAD DESCRIPTOR PIPE``.

It imports the module ``PRELOAD``, and answers each connection to the socket with a fork that runs a module as
``python -m`` would. A connection has one request, its answer, and at the end the exit code; a fork whose connection
is closed is killed. It ends, and its forks with it, once nobody writes to the named pipe ``PIPE`` any more.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress

from areal_lora.processes import watched
from areal_lora.processes.startup import collector_paused

LARGEST = 1 << 17  # bytes of a request: arguments and an environment
STANDARD = 3  # descriptors: input, output, errors
LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = ("mnt", "net", "uts")
SET_MM, SET_MM_MAP = 35, 14  # of prctl


def main() -> None:
    if os.fork():  # below no lane: a supervisor in a lane ends what is started below that one
        os._exit(0)
    os.setsid()
    preload, listener = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    session = os.open(sys.argv[3], os.O_RDONLY | os.O_NONBLOCK)
    with collector_paused():
        importlib.import_module(preload)
    del sys.modules[preload]  # a fork may run it as its main program
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    forks: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([session, woken, listener, *forks], [], [])
        if session in ready:
            break
        if woken in ready:
            os.read(woken, LARGEST)
            report_ended(forks)
        for client in forks.keys() & set(ready):
            os.kill(forks[client], signal.SIGKILL)
            os.waitpid(forks.pop(client), 0)
            client.close()
        if listener in ready:
            client, _ = listener.accept()
            request, descriptors, _, _ = socket.recv_fds(client, LARGEST, STANDARD)
            if len(descriptors) == STANDARD:
                asker, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for number in (session, woken, waker, *(each.fileno() for each in (listener, client, *forks))):
                        os.close(number)
                    run(*json.loads(request), descriptors, asker)
                forks[client] = pid
                with suppress(OSError):  # the requester has just ended: the next look kills the fork
                    client.send(str(pid).encode())
            else:  # whoever waits for the imports
                client.close()
            for number in descriptors:
                os.close(number)
    for pid in forks.values():
        os.kill(pid, signal.SIGKILL)


def report_ended(forks: dict[socket.socket, int]) -> None:
    """Send the codes of forks that have ended, as ``Popen.returncode`` has them."""
    for client, pid in list(forks.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with suppress(OSError):  # whoever asked has just ended
                client.send(str(os.waitstatus_to_exitcode(status)).encode())
            client.close()
            del forks[client]


def join_namespaces(pid: int) -> None:
    """See the disks, interfaces and host name that process ``pid`` sees, as its child would. Raises OSError."""
    for kind in NAMESPACES:
        with open(f"/proc/{pid}/ns/{kind}", "rb") as theirs:
            own = os.stat(f"/proc/self/ns/{kind}")
            if os.fstat(theirs.fileno()).st_ino != own.st_ino and LIBC.setns(theirs.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {kind}")


class _Map(ctypes.Structure):
    """``prctl_mm_map`` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show(words: list[str], environment: dict[str, str]) -> ctypes.Array[ctypes.c_char]:
    """Be seen in /proc with these, by which tests find processes, as long as the result lives. Raises OSError."""
    arguments, variables = (
        b"".join(os.fsencode(word) + b"\0" for word in each)
        for each in (words, (f"{name}={value}" for name, value in environment.items()))
    )
    shown = ctypes.create_string_buffer(arguments + variables, len(arguments) + len(variables))
    at = ctypes.addressof(shown)
    with open("/proc/self/stat", encoding="ascii") as stat:
        fields = [0, 0, *stat.read().rpartition(")")[2].split()]  # numbered as in proc(5), from 1
    code, data, heap, stack = fields[25:27], fields[44:46], fields[46], fields[27]
    middle, end = at + len(arguments), at + len(shown)
    LIBC.sbrk.restype = ctypes.c_void_p
    places = (*code, *data, heap, LIBC.sbrk(0), stack, at, middle, middle, end, 0)
    each = _Map(*map(int, places), 0, 2**32 - 1)
    if LIBC.prctl(SET_MM, SET_MM_MAP, ctypes.byref(each), ctypes.c_ulong(ctypes.sizeof(each)), 0):
        raise OSError(ctypes.get_errno(), "prctl: PR_SET_MM_MAP")
    return shown


def run(
    module: str, arguments: list[str], environment: dict[str, str], cwd: str, descriptors: list[int], asker: int
) -> None:
    """Be a new interpreter whose main program is ``module``, up to its exit code; does not return."""
    code = 1
    try:
        os.setsid()  # whoever ends sessions must not find that of the tests
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
        os.environ.clear()
        os.environ.update(environment)
        watched._plan = watched.parse(text) if (text := os.environ.get(watched.VARIABLE)) else None  # as at its import
        join_namespaces(asker)
        os.chdir(cwd)
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        sys.argv = [module, *arguments]
        _shown = show([sys.executable, "-m", *sys.argv], environment)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # fault boundary: printed, as by an interpreter  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

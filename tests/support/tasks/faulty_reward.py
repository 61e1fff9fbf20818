"""A reward that misbehaves as the completion tells it to; loaded by file into scorer children."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import msgspec


def reward(completion: str, gold: str) -> float:
    match completion:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "nap":
            time.sleep(0.2)
        case "hang_deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while True:
                pass
        case "hang_without_timers":
            for timer in range(10):
                ctypes.CDLL(None).syscall({"x86_64": 226, "aarch64": 111}[os.uname().machine], timer)  # timer_delete
            while True:
                pass
        case "kill_self":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang_later":
            signal.signal(signal.SIGALRM, lambda *_: time.sleep(3600))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        case "exit":
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "native_segfault":
            ctypes.string_at(1)
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "none":
            return None  # type: ignore[return-value]
        case "raise":
            raise RuntimeError("broken on purpose")
        case "undecodable":
            raise RuntimeError(b"caf\xe9".decode(errors="surrogateescape"))
        case "raise_nasty":
            raise Nasty
        case "exit_quietly":
            sys.exit(0)
        case "allocate":
            return float(len(bytearray(64 << 30)))
        case "allocate_slowly":
            hoard = []
            while True:
                hoard.append(bytearray(8 << 20))
        case "recurse":
            return reward_again()
        case "print":
            print(b"noise \xe9".decode(errors="surrogateescape") * 1000, flush=True)
            os.write(1, b"more noise")
        case "flood":
            while True:
                print("flood " * 1000)
                os.write(1, b"flood" * 1000)
                os.write(2, b"flood" * 1000)
        case "flood_pipes":
            for fd in descriptors():
                with contextlib.suppress(OSError):
                    os.write(fd, b"\xff" * 100_000)
        case "forge":
            verdict = msgspec.msgpack.encode({"index": 5, "value": 1.0})
            for fd in descriptors():
                with contextlib.suppress(OSError):
                    os.write(fd, len(verdict).to_bytes(4, "big") + verdict)
        case "stdin":
            return float(len(sys.stdin.read()) + len(os.read(0, 100)))
        case "close":
            os.closerange(0, 256)
        case "close_and_sleep":
            os.closerange(0, 256)
            time.sleep(3600)
        case "thread":
            threading.Thread(target=spin, daemon=True).start()
        case "short_thread":
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            return 1.0
        case "fork_bomb":
            while True:
                os.fork()
        case "stubborn_fork_bomb":
            while True:
                ctypes.CDLL(None).fork()
        case "subprocess":
            subprocess.run(["true"], check=True)
        case "connect":
            socket.create_connection(("127.0.0.1", int(gold)), timeout=60)
        case "connect_natively":
            if ctypes.CDLL(None, use_errno=True).socket(2, 1, 0) < 0:
                raise OSError(ctypes.get_errno(), "no socket")
        case "unix_socket":
            socket.socket(socket.AF_UNIX).connect(gold)
        case "url":
            urllib.request.urlopen(gold, timeout=60)
        case "kill_parent":
            os.kill(os.getppid(), signal.SIGKILL)
        case "kill_group":
            os.kill(0, signal.SIGKILL)
        case "limit_parent":
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))
        case "raise_limit":
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        case "read":
            return float(len(Path(gold).read_bytes()) > 0)
        case "read_parent":
            return float(len(Path(f"/proc/{os.getppid()}/environ").read_bytes()))
        case "write":
            Path(gold).write_text("x")
        case "delete":
            Path(gold).unlink()
        case "chmod":
            Path(gold).chmod(0o777)
        case "share_memory":
            return float(ctypes.CDLL(None).shmget(0, 1 << 20, 0o600) >= 0)
        case "capabilities":
            status = Path("/proc/self/status").read_text()
            return float(int(status.partition("CapEff:")[2].split()[0], 16))
        case "pid":
            return float(os.getpid())
        case "core_limit":
            return float(resource.getrlimit(resource.RLIMIT_CORE)[0])
        case "memory_limit":
            return float(resource.getrlimit(resource.RLIMIT_AS)[1])
        case "environment":
            return float(len(set(os.environ) - {"PATH", "LD_LIBRARY_PATH", "LC_CTYPE", "TMPDIR", "HOME"}))
        case "sockets":
            return float(sum(1 for fd in descriptors() if _is_socket(fd)))
    return float(completion == gold)


class Nasty(Exception):
    def __str__(self) -> str:
        raise ValueError("even its text fails")


def reward_again() -> float:
    return reward_again()


def spin() -> None:
    while True:
        pass


def descriptors() -> list[int]:
    return [int(fd) for fd in os.listdir("/proc/self/fd")]


def _is_socket(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False

"""A reward that misbehaves as the completion tells it to; loaded by file into scorer children."""

import os
import resource
import signal
import socket
import sys
import time


def reward(completion: str, gold: str) -> float:
    match completion:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "exit":
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "none":
            return None  # type: ignore[return-value]
        case "raise":
            raise RuntimeError("broken on purpose")
        case "exit_quietly":
            sys.exit(0)
        case "allocate":
            return float(len(bytearray(64 << 30)))
        case "print":
            print("noise " * 1000, flush=True)
            os.write(1, b"more noise")
        case "pid":
            return float(os.getpid())
        case "core_limit":
            return float(resource.getrlimit(resource.RLIMIT_CORE)[0])
        case "memory_limit":
            return float(resource.getrlimit(resource.RLIMIT_AS)[1])
        case "environment":
            return float(len(set(os.environ) - {"PATH", "LC_CTYPE"}))
        case "sockets":
            return float(sum(1 for fd in os.listdir("/proc/self/fd") if _is_socket(int(fd))))
    return float(completion == gold)


def _is_socket(fd: int) -> bool:
    try:
        socket.socket(fileno=os.dup(fd)).close()
    except OSError:
        return False
    return True

"""A time limit for this process, enforced by the kernel: SIGKILL by a POSIX timer.

Neither user code that hangs in C with all signals blocked nor a stopped parent delays it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct

# Numbers of timer_create and timer_settime: their names in the C library differ between versions.
_CALLS = {"x86_64": (222, 223), "aarch64": (107, 110)}
_CLOCK_MONOTONIC, _SIGEV_SIGNAL = 1, 0


class Deadline:
    """End this process if more than the allowed seconds pass between ``start`` and ``stop``."""

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

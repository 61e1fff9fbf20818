"""An Ethernet switch in userspace: ``python -m tests.support.launcher.lossy_switch DELAY_S LOSS NAMESPACE...``

It makes ``eth0``, a TAP device, in every network namespace, and prints ``ready``. A frame reaches the other end DELAY_S
later, or is dropped with probability LOSS; frames keep their order. SIGTERM ends it, and the devices with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 65536
BACKLOG_BYTES = 8 << 20  # frames on their way to one host; more are dropped, as in a router
_LIBC = ctypes.CDLL(None, use_errno=True)


def tap(namespace: str) -> int:
    """A TAP device ``eth0`` in ``namespace``; the calling process stays where it is."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(Path("/var/run/netns") / namespace, os.O_RDONLY)
    try:
        enter(there)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
        return device
    finally:
        enter(here)
        os.close(here)
        os.close(there)


def enter(namespace: int) -> None:
    """Move this thread to a network namespace (a file descriptor)."""
    if _LIBC.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Switch:
    """Frames go to the host that has shown the address, and to all others while it is unknown."""

    def __init__(self, devices: list[int], delay_s: float, loss: float, seed: int = 0) -> None:
        self._devices, self._delay_s, self._loss, self._dice = devices, delay_s, loss, random.Random(seed)
        self._learnt: dict[bytes, int] = {}
        self._queues: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices}
        self._bytes = dict.fromkeys(devices, 0)
        self._selector = selectors.DefaultSelector()
        for device in devices:
            self._selector.register(device, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            due = min((queue[0][0] for queue in self._queues.values() if queue), default=None)
            wait_s = None if due is None else max(0.0, due - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                self._take(key.fd)
            self._give()

    def _take(self, device: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(device, FRAME_BYTES)
            except BlockingIOError:
                return
            to, source = frame[:6], frame[6:12]
            self._learnt[source] = device
            known = self._learnt.get(to)
            for target in [known] if known is not None else self._devices:
                if target == device or self._dice.random() < self._loss:
                    continue
                if self._bytes[target] + len(frame) <= BACKLOG_BYTES:
                    self._bytes[target] += len(frame)
                    self._queues[target].append((time.monotonic() + self._delay_s, frame))

    def _give(self) -> None:
        now = time.monotonic()
        for device, queue in self._queues.items():
            while queue and queue[0][0] <= now:
                _, frame = queue.popleft()
                self._bytes[device] -= len(frame)
                try:
                    os.write(device, frame)
                except (BlockingIOError, OSError):
                    continue  # the device is not up yet, or its queue is full: lost


if __name__ == "__main__":
    switch = Switch([tap(name) for name in sys.argv[3:]], float(sys.argv[1]), float(sys.argv[2]))
    print("ready", flush=True)
    switch.run()

"""Memory that other processes on this machine read where it lies, so that its bytes go over no socket.

    source                                      receiver on the same machine
    Segment  generation | tensors | trailer     Window, the same pages, read-only
             renew(), pack, signal(part)  --->  view(signal), read, still the same generation?

A segment is a memfd: it has no name in any file system, and the kernel frees it with the last
process that holds it, however that process ends. It is found through ``/proc``, so only a process
of the same user, or one that may look at the source anyway, can open it.

Bytes that were received are a receiver's own; these are not. A source raises the generation before
it writes the first byte of another version. Who compares it after the last read knows that all
that was read is of one version (a seqlock with one writer).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import sys
import weakref
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch

from areal_lora.errors import PublishError
from areal_lora.platforms.device import PAGE_BYTES, host_buffer

_SIGNAL = struct.Struct("<qqQQQ16s")
_PLACE_BYTES = 16
SIGNAL_BYTES = _SIGNAL.size
CARD_BYTES = _PLACE_BYTES + SIGNAL_BYTES
NO_CARD = bytes(CARD_BYTES)
"""Of a source whose memory nobody else can read."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Bytes ``[begin, begin + nbytes)`` of a segment hold what was packed as ``generation``.

    The segment is file descriptor ``fd`` of process ``pid``; ``nonce`` (16 bytes) tells it from whatever
    else these two numbers mean at another time or place.
    """

    pid: int
    fd: int
    generation: int
    begin: int
    nbytes: int
    nonce: bytes

    def encode(self) -> bytes:
        """``SIGNAL_BYTES`` long."""
        return _SIGNAL.pack(*astuple(self))

    @classmethod
    def decode(cls, raw: bytes) -> Signal:
        return cls(*_SIGNAL.unpack(raw))


class Segment:
    """Memory of a packed shard: ``bytes`` is uint8 [nbytes] and begins on a page.

    Where ``device`` is the CPU, receivers on this machine can map it; else it is page-locked and private.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nonce, self._fd = secrets.token_bytes(16), -1
        if device.type != "cpu" or sys.platform != "linux":
            whole = host_buffer(PAGE_BYTES + nbytes, device)
        else:
            self._fd = os.memfd_create(_name(self._nonce), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self._fd)
            os.ftruncate(self._fd, PAGE_BYTES + nbytes)
            # A reader of pages that were cut off would be killed (SIGBUS).
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            pages = mmap.mmap(self._fd, PAGE_BYTES + nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            whole = np.frombuffer(pages, dtype=np.uint8)
        self._generation = whole[:8].view(np.uint64)
        self.bytes = whole[PAGE_BYTES:]

    def renew(self) -> None:
        """Call before the first byte of another version is written: whoever still reads is told by it."""
        self._generation[0] += np.uint64(1)

    def signal(self, begin: int, nbytes: int) -> Signal:
        """That a part is ready to be read, in the present generation."""
        if self._fd < 0:
            raise PublishError("this shard's memory belongs to a device and cannot be read by other processes")
        return Signal(os.getpid(), self._fd, int(self._generation[0]), begin, nbytes, self._nonce)

    def card(self) -> bytes:
        """``CARD_BYTES`` by which ``readable`` finds out whether its process can read segments of this one."""
        return _place() + self.signal(0, len(self.bytes)).encode()


class Window:
    """A segment of another process. Raises OSError where it is not to be found or may not be read."""

    def __init__(self, signal: Signal) -> None:
        path, link = f"/proc/{signal.pid}/fd/{signal.fd}", f"/memfd:{_name(signal.nonce)} (deleted)"
        _check_link(path, link)  # first: opening a foreign file may do something to it
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check_link(f"/proc/self/fd/{fd}", link)
            pages = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        whole = np.frombuffer(pages, dtype=np.uint8)
        self._generation, self._bytes = whole[:8].view(np.uint64), whole[PAGE_BYTES:]

    @property
    def generation(self) -> int:
        """The present one."""
        return int(self._generation[0])

    def view(self, signal: Signal) -> np.ndarray:
        """uint8 [signal.nbytes], read-only, valid as long as this is held. Raises PublishError for a part outside."""
        part = self._bytes[signal.begin : signal.begin + signal.nbytes]
        if len(part) != signal.nbytes:
            raise PublishError(f"the source speaks of bytes {signal.begin} onwards of {len(self._bytes)}: {signal}")
        return part


def readable(card: bytes) -> bool:
    """Whether this process can read the memory of the one that made ``card``."""
    if card[:_PLACE_BYTES] != _place():
        return False  # the process id would mean another process here
    signal = Signal.decode(card[_PLACE_BYTES:])
    try:
        return Window(signal).generation == signal.generation
    except OSError:
        return False  # another user's, or /proc is kept from this one


def _place() -> bytes:
    """Digest of this boot of this machine and of the namespace in which process ids mean something here.

    Never ``NO_CARD``'s. Unreadable parts give a place of its own, which no other process is at.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_bytes(_PLACE_BYTES)
    return hashlib.blake2b(boot + namespace.encode(), digest_size=_PLACE_BYTES).digest()


def _name(nonce: bytes) -> str:
    return f"areal_lora-{nonce.hex()}"


def _check_link(path: str, link: str) -> None:
    if os.readlink(path) != link:
        raise FileNotFoundError(errno.ENOENT, "another file than the source's segment", path)

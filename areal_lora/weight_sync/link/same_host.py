"""Shared memory of a packed shard that receivers on the same machine read in place, without a socket.

    source                                                     receiver on the same machine
    SharedSegment  generation, ready | tensors | trailer       MappedSegment, the same pages, read-only
                   renew()  signal() ---- broadcast --->       wait until ready, view, read
                   pack, advance(ready), pack ...              still the same generation?
                   signal() ---- broadcast --->

A segment is a memfd: it has no name in any file system, and the kernel frees it with the last process that holds it.
Receivers find it through ``/proc``, so only a process of the same user, or one that may trace the source, can open it.

A source raises the generation before it writes the first byte of another version. A receiver that compares the
generation after its last read knows that all bytes belong to one version (a seqlock with one writer).
"""

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from areal_lora.errors import PublishError
from areal_lora.platforms.device import PAGE_BYTES, host_buffer
from areal_lora.processes.log import get_logger

_SIGNAL = struct.Struct("<qqQ16s")
_GENERATION, _READY, _HEAD = 0, 1, 2  # words of 8 bytes at a segment's start
_PLACE_BYTES = 16
SIGNAL_BYTES = _SIGNAL.size
CARD_BYTES = _PLACE_BYTES + SIGNAL_BYTES
NO_CARD = bytes(CARD_BYTES)
"""Card of a source whose memory is private."""

log = get_logger(__name__)


class Signal(NamedTuple):
    """A version is packed, or being packed, into a segment as its ``generation``.

    The segment is file descriptor ``fd`` of process ``pid``; ``nonce`` (16 bytes) distinguishes it from
    other files with these two numbers at another time or on another machine.
    """

    pid: int
    fd: int
    generation: int
    nonce: bytes

    def encode(self) -> bytes:
        """``SIGNAL_BYTES`` long."""
        return _SIGNAL.pack(*self)

    @classmethod
    def decode(cls, raw: bytes) -> "Signal":
        return cls(*_SIGNAL.unpack(raw))


class SharedSegment:
    """Memory of a packed shard: ``bytes`` is uint8 [nbytes] and starts on a page.

    On a CPU with memfds receivers of this machine can map it; else it is private, for a device page-locked.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nonce = secrets.token_bytes(16)
        self._fd = _memfd(_name(self._nonce)) if device.type == "cpu" else -1
        if not self.shared:
            whole = host_buffer(PAGE_BYTES + nbytes, device)
        else:
            weakref.finalize(self, os.close, self._fd)
            os.ftruncate(self._fd, PAGE_BYTES + nbytes)
            # SIGBUS kills a reader of pages that were cut off.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            pages = mmap.mmap(self._fd, PAGE_BYTES + nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            whole = np.frombuffer(pages, dtype=np.uint8)
        self._head = whole[: _HEAD * 8].view(np.uint64)
        self.bytes = whole[PAGE_BYTES:]

    @property
    def shared(self) -> bool:
        """Whether other processes can map the segment."""
        return self._fd >= 0

    def renew(self) -> None:
        """Call before the first byte of another version is written: late receivers notice the new generation."""
        self._head[_READY] = 0  # first: a receiver that knows the new generation must not see the old counter
        self._head[_GENERATION] += np.uint64(1)

    def advance(self, ready: int) -> None:
        """The first ``ready`` bytes are final."""
        self._head[_READY] = ready

    def signal(self) -> Signal:
        """Signal of the current generation. Raises PublishError for private memory."""
        if not self.shared:
            raise PublishError("this shard's memory is private and cannot be read by other processes")
        return Signal(os.getpid(), self._fd, int(self._head[_GENERATION]), self._nonce)

    def card(self) -> bytes:
        """``CARD_BYTES`` from which ``readable`` decides whether its process can read segments of this process."""
        return _place() + self.signal().encode()


class MappedSegment:
    """A mapped segment of another process. Raises OSError if it is missing or unreadable."""

    def __init__(self, signal: Signal) -> None:
        path, link = f"/proc/{signal.pid}/fd/{signal.fd}", f"/memfd:{_name(signal.nonce)} (deleted)"
        self._path, self._link = path, link
        _check_link(path, link)  # first: opening a foreign file may have side effects
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check_link(f"/proc/self/fd/{fd}", link)
            pages = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        whole = np.frombuffer(pages, dtype=np.uint8)
        self._head, self._bytes = whole[: _HEAD * 8].view(np.uint64), whole[PAGE_BYTES:]

    @property
    def held(self) -> bool:
        """Whether the source still has this segment."""
        try:
            _check_link(self._path, self._link)
        except OSError:
            return False
        return True

    @property
    def generation(self) -> int:
        return int(self._head[_GENERATION])

    @property
    def ready(self) -> int:
        """Number of leading bytes that can be read, if the generation is still the same afterwards."""
        return int(self._head[_READY])

    def view(self, start: int, end: int) -> np.ndarray:
        """Read-only uint8 [end - start], valid as long as the window. Raises PublishError for a part outside."""
        part = self._bytes[start:end]
        if len(part) != end - start:
            raise PublishError(f"the source has {len(self._bytes)} bytes, {start} to {end} were expected")
        return part


def readable(card: bytes) -> bool:
    """Whether this process can read the memory of the process that made ``card``."""
    if card[:_PLACE_BYTES] != _place():
        return False  # the process id names another process here
    signal = Signal.decode(card[_PLACE_BYTES:])
    try:
        return MappedSegment(signal).generation == signal.generation
    except OSError:
        return False  # of another user, or /proc is not accessible


def _place() -> bytes:
    """Digest of the boot id of this machine and of the namespace of its process ids; never that of ``NO_CARD``.

    If one of them is unreadable, a random digest, which no other process has.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_bytes(_PLACE_BYTES)
    return hashlib.blake2b(boot + namespace.encode(), digest_size=_PLACE_BYTES).digest()


def _memfd(name: str) -> int:
    """Create a memfd; -1 if the system has none or refuses one."""
    if sys.platform != "linux":
        return -1
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as e:
        log.warning("cannot share memory with servers on this machine, versions are sent over the network: %s", e)
        return -1


def _name(nonce: bytes) -> str:
    return f"areal_lora-{nonce.hex()}"


def _check_link(path: str, link: str) -> None:
    if os.readlink(path) != link:
        raise FileNotFoundError(errno.ENOENT, "another file than the source's segment", path)

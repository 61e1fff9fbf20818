"""Memory that other processes on this machine read where it lies, so that its bytes go over no socket.

    source                                               receiver on the same machine
    SharedSegment  generation, ready | tensors | trailer  Window, the same pages, read-only
             renew()  signal() ---- broadcast --->       wait until ready, view, read
             pack, advance(ready), pack ...              still the same generation?
             signal() ---- broadcast --->

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
from areal_lora.processes.log import get_logger

_SIGNAL = struct.Struct("<qqQ16s")
_GENERATION, _READY, _HEAD = 0, 1, 2  # words of 8 bytes at a segment's start
_PLACE_BYTES = 16
SIGNAL_BYTES = _SIGNAL.size
CARD_BYTES = _PLACE_BYTES + SIGNAL_BYTES
NO_CARD = bytes(CARD_BYTES)
"""Of a source whose memory nobody else can read."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Signal:
    """A version is in a segment, or getting there, as its ``generation``.

    The segment is file descriptor ``fd`` of process ``pid``; ``nonce`` (16 bytes) tells it from whatever
    else these two numbers mean at another time or place.
    """

    pid: int
    fd: int
    generation: int
    nonce: bytes

    def encode(self) -> bytes:
        """``SIGNAL_BYTES`` long."""
        return _SIGNAL.pack(*astuple(self))

    @classmethod
    def decode(cls, raw: bytes) -> Signal:
        return cls(*_SIGNAL.unpack(raw))


class SharedSegment:
    """Memory of a packed shard: ``bytes`` is uint8 [nbytes] and begins on a page.

    Where ``device`` is the CPU, receivers on this machine can map it; else it is page-locked and private. It is
    private, too, where the system has or allows no memfd.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nonce = secrets.token_bytes(16)
        self._fd = _memfd(_name(self._nonce)) if device.type == "cpu" else -1
        if not self.shared:
            whole = host_buffer(PAGE_BYTES + nbytes, device)
        else:
            weakref.finalize(self, os.close, self._fd)
            os.ftruncate(self._fd, PAGE_BYTES + nbytes)
            # A reader of pages that were cut off would be killed (SIGBUS).
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            pages = mmap.mmap(self._fd, PAGE_BYTES + nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            whole = np.frombuffer(pages, dtype=np.uint8)
        self._head = whole[: _HEAD * 8].view(np.uint64)
        self.bytes = whole[PAGE_BYTES:]

    @property
    def shared(self) -> bool:
        """Whether other processes could map it."""
        return self._fd >= 0

    def renew(self) -> None:
        """Call before the first byte of another version is written: whoever still reads is told by it."""
        self._head[_READY] = 0  # first: who knows the new generation must not see how far the old one was
        self._head[_GENERATION] += np.uint64(1)

    def advance(self, ready: int) -> None:
        """The first ``ready`` bytes are as they will stay."""
        self._head[_READY] = ready

    def signal(self) -> Signal:
        """Of the present generation. Raises PublishError for memory that cannot be shared."""
        if not self.shared:
            raise PublishError("this shard's memory is private and cannot be read by other processes")
        return Signal(os.getpid(), self._fd, int(self._head[_GENERATION]), self._nonce)

    def card(self) -> bytes:
        """``CARD_BYTES`` by which ``readable`` finds out whether its process can read segments of this one."""
        return _place() + self.signal().encode()


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
        self._head, self._bytes = whole[: _HEAD * 8].view(np.uint64), whole[PAGE_BYTES:]

    @property
    def generation(self) -> int:
        """The present one."""
        return int(self._head[_GENERATION])

    @property
    def ready(self) -> int:
        """So many leading bytes can be read, if the generation is still the same afterwards."""
        return int(self._head[_READY])

    def view(self, begin: int, end: int) -> np.ndarray:
        """uint8 [end - begin], read-only, valid as long as this is held. Raises PublishError for a part outside."""
        part = self._bytes[begin:end]
        if len(part) != end - begin:
            raise PublishError(f"the source has {len(self._bytes)} bytes, {begin} to {end} were expected")
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


def _memfd(name: str) -> int:
    """-1 where the system does not have them, or refuses one."""
    if sys.platform != "linux":
        return -1
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as e:
        log.warning("no memory to share with servers on this machine, versions go over the network: %s", e)
        return -1


def _name(nonce: bytes) -> str:
    return f"areal_lora-{nonce.hex()}"


def _check_link(path: str, link: str) -> None:
    if os.readlink(path) != link:
        raise FileNotFoundError(errno.ENOENT, "another file than the source's segment", path)

"""Inbox of one version from one source: parts arrive in own buffers, or lie in the source's memory."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from areal_lora.errors import PublishError
from areal_lora.platforms.device import host_buffer, lane_of
from areal_lora.weight_sync.link.same_host import SIGNAL_BYTES, MappedSegment, Signal

POLL_S, LONGEST_POLL_S = 1e-4, 2e-3  # interval of polling how far a source has packed
RING = 3  # parts of one source in flight: one being read, the others on the wire


Part = tuple[int, int]
"""(start, end) in the source's memory, bytes."""
Memory: TypeAlias = np.ndarray | torch.Tensor
"""uint8: an array is host memory, a tensor that of a device."""


@dataclass(frozen=True, slots=True)
class BucketBytes:
    """A shard's bytes from ``start`` on, uint8; valid until the call that gets them returns."""

    memory: Memory
    start: int

    @property
    def base(self) -> int:
        """Address where the shard would start, on the host."""
        memory = self.memory
        return (memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr()) - self.start


class Arriving(Protocol):
    def wait(self) -> None:
        """Raises PublishError."""

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""


Start = Callable[[torch.Tensor], Arriving]
"""Post the receive of the next broadcast into uint8 [nbytes]."""


class Ring:
    """Staging memory for one source; grows when needed and is reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nbytes, self._buffers = 0, list[Memory]()

    def sized(self, nbytes: int, on_device: bool) -> list[Memory]:
        """``RING`` buffers of at least ``nbytes``, all calls on the same side; earlier views become invalid."""
        if self._nbytes < nbytes:
            self._nbytes, self._buffers = nbytes, []  # the old ones first
            lane = lane_of(self._device) if on_device else None
            for _ in range(RING):
                self._buffers.append(
                    lane.empty([nbytes], torch.uint8) if lane is not None else host_buffer(nbytes, self._device)
                )
        return self._buffers


class RingInbox:
    """Receive parts over the wire, the first at once, each into the buffer that has been free for longest."""

    def __init__(self, ring: Ring, parts: Sequence[Part], start: Start, on_device: bool = False) -> None:
        sizes = [end - start for start, end in parts]
        self._start, self._ahead = start, deque(sizes)
        self._free = deque(ring.sized(max(sizes), on_device))
        self._posted: deque[tuple[Memory, int, Arriving]] = deque()
        self._taken: Memory | None = None
        while self._free and self._ahead:
            self._post()

    def _post(self) -> None:
        buffer, nbytes = self._free.popleft(), self._ahead.popleft()
        self._posted.append((buffer, nbytes, self._start(torch.as_tensor(buffer[:nbytes]))))

    def take(self) -> Memory:
        """Wait for the next part, uint8 [its size]; valid until the next ``take``. Raises PublishError."""
        if self._taken is not None:
            self._free.append(self._taken)
            self._taken = None
            if self._ahead:
                self._post()
        buffer, nbytes, arriving = self._posted.popleft()
        arriving.wait()
        self._taken = buffer
        return buffer[:nbytes]

    def finish(self) -> None:
        """Call after the last access to any part. Nothing: no other process writes into these buffers."""


class Windows:
    """Mapped segments of one source, which has one for each adapter. Those that it has freed are unmapped."""

    def __init__(self) -> None:
        self._open: dict[bytes, MappedSegment] = {}

    def of(self, signal: Signal) -> MappedSegment:
        """Map the segment of ``signal``. Raises PublishError if the source's process has ended."""
        if signal.nonce not in self._open:
            self._open = {nonce: window for nonce, window in self._open.items() if window.held}
            try:
                self._open[signal.nonce] = MappedSegment(signal)
            except OSError as e:
                raise PublishError(f"the memory of process {signal.pid} can no longer be read: {e}") from e
        return self._open[signal.nonce]


class WindowInbox:
    """Read parts in the source's memory; a counter in that memory shows how far they are ready.

    Two signals arrive over the wire, at its start and its end; the second fails if the source dies or abandons it.
    """

    def __init__(self, windows: Windows, parts: Sequence[Part], start: Start, deadline: float) -> None:
        self._windows, self._parts, self._deadline = windows, deque(parts), deadline
        self._signal = np.zeros((2, SIGNAL_BYTES), dtype=np.uint8)
        self._begun, self._complete = (start(torch.from_numpy(signal)) for signal in self._signal)
        self._version: Signal | None = None

    def take(self) -> np.ndarray:
        """See `RingInbox.take`."""
        if time.monotonic() >= self._deadline:
            raise PublishError("the deadline has passed, the version is abandoned")  # another version may need the slot
        start, end = self._parts.popleft()
        if self._version is None:
            self._begun.wait()
            self._version = Signal.decode(self._signal[0].tobytes())
        window = self._windows.of(self._version)
        pause_s = POLL_S
        while window.ready < end and not self._complete.done():
            if time.monotonic() >= self._deadline:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        if window.ready < end:
            self._complete.wait()  # raises, unless the source is at another version
        self.finish()
        return window.view(start, end)

    def finish(self) -> None:
        """Call after the last access to any part. Raises PublishError if the parts may belong to two versions."""
        if self._version is not None and self._windows.of(self._version).generation != self._version.generation:
            raise PublishError("the source packs another version while this one was read; this one is abandoned")

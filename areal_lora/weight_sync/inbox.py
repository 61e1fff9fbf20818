"""Where a receiver finds what one source sends of one version: in buffers of its own, or in the source's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from areal_lora.errors import PublishError
from areal_lora.platforms.device import host_buffer
from areal_lora.weight_sync.same_host import SIGNAL_BYTES, Signal, Window

RING = 3  # parts of one source in flight: one being read, the others on the wire
KEPT_WINDOWS = 16  # per group; a source has one segment for each layout


class Arriving(Protocol):
    def wait(self) -> None: ...


Start = Callable[[torch.Tensor], Arriving]
"""Post the receive of the next broadcast into uint8 [nbytes]."""


class Inbox(Protocol):
    """The parts of one version in order. First receives are posted when it is made."""

    def take(self) -> np.ndarray:
        """Wait for the next part, uint8 [its size]; valid until the next ``take``. Raises PublishError."""
        ...

    def finish(self) -> None:
        """Call after the last look at any part. Raises PublishError if what was seen may be of two versions."""
        ...


class Ring:
    """Staging memory for one source, grown when needed, then reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[np.ndarray] = [np.empty(0, dtype=np.uint8)] * RING

    def sized(self, nbytes: int) -> list[np.ndarray]:
        """``RING`` buffers of at least ``nbytes``; earlier views become invalid."""
        if self._buffers[0].size < nbytes:
            self._buffers = [host_buffer(nbytes, self._device) for _ in range(RING)]
        return self._buffers


class RingInbox:
    """Parts arrive over the wire, each in the buffer that has been free for longest."""

    def __init__(self, ring: Ring, sizes: Sequence[int], start: Start) -> None:
        self._start, self._ahead = start, deque(sizes)
        self._free = deque(ring.sized(max(sizes)))
        self._posted: deque[tuple[np.ndarray, int, Arriving]] = deque()
        self._taken: np.ndarray | None = None
        while self._free and self._ahead:
            self._post()

    def _post(self) -> None:
        buffer, nbytes = self._free.popleft(), self._ahead.popleft()
        self._posted.append((buffer, nbytes, self._start(torch.from_numpy(buffer[:nbytes]))))

    def take(self) -> np.ndarray:
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
        """Nothing: nobody else writes into these buffers."""


class Windows:
    """The segments of one source that this process has mapped."""

    def __init__(self) -> None:
        self._open: dict[bytes, Window] = {}

    def of(self, signal: Signal) -> Window:
        """Raises PublishError if the source's process is gone."""
        if signal.nonce not in self._open:
            for old in list(islice(self._open, max(len(self._open) + 1 - KEPT_WINDOWS, 0))):
                del self._open[old]
            try:
                self._open[signal.nonce] = Window(signal)
            except OSError as e:
                raise PublishError(f"the memory of process {signal.pid} can no longer be read: {e}") from e
        return self._open[signal.nonce]


class WindowInbox:
    """Parts lie in the source's memory; the wire brings one ``Signal`` for each."""

    def __init__(self, windows: Windows, sizes: Sequence[int], start: Start) -> None:
        self._windows = windows
        signals = [np.zeros(SIGNAL_BYTES, dtype=np.uint8) for _ in sizes]
        self._posted = deque(
            (nbytes, raw, start(torch.from_numpy(raw))) for nbytes, raw in zip(sizes, signals, strict=True)
        )
        self._first: Signal | None = None

    def take(self) -> np.ndarray:
        nbytes, raw, arriving = self._posted.popleft()
        arriving.wait()
        signal = Signal.decode(raw.tobytes())
        self._first = self._first or signal
        same = (self._first.nonce, self._first.generation) == (signal.nonce, signal.generation)
        if not same or signal.nbytes != nbytes:
            raise PublishError(f"{nbytes} bytes of the version of {self._first} were expected, the source has {signal}")
        self.finish()
        return self._windows.of(signal).view(signal)

    def finish(self) -> None:
        if self._first is not None and self._windows.of(self._first).generation != self._first.generation:
            raise PublishError("the source has gone on to another version while this one was read; it was given up")

"""An accelerator's streams and current devices as torch has them, without an accelerator."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

POOL = 32  # c10/cuda/CUDAStream.h: streams of one priority on a device; the next one is the first again
LOWEST, HIGHEST = 0, -3  # priorities with a pool; `ProcessGroupNCCL.Options` chooses between these two


class Accelerator:
    """Replaces ``torch.Stream`` and what selects devices. ``contexts``: devices on which a thread made one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts: set[int] = set()
        self.taken: Counter[int] = Counter()  # by priority
        self._thread = threading.local()
        monkeypatch.setattr(torch, "Stream", self._stream)
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(set_device=self._set_device))

    def take(self, priority: int) -> int:
        """The next stream of a priority, by its id."""
        self.taken[priority] += 1
        return -POOL * priority + (self.taken[priority] - 1) % POOL

    @property
    def current(self) -> int:
        """Index of the calling thread's device."""
        return int(vars(self._thread).get("index", 0))

    def select(self, index: int) -> None:
        self._thread.index = index
        self.contexts.add(index)

    def _set_device(self, device: torch.device) -> None:
        self.select(device.index)

    def _stream(
        self,
        device: torch.device | None = None,
        *,
        priority: int = LOWEST,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = 1,
    ) -> PooledStream:
        if device is not None:
            device_index, stream_id = device.index, self.take(priority)
        assert device_index is not None
        assert stream_id is not None
        return PooledStream(self, stream_id, device_index, device_type)


class PooledStream:
    """A ``torch.Stream`` of torch 2.11: an object can be entered again only after it was left.

    Leaving it selects the device that the thread had before, also if the process has no context there.
    """

    def __init__(self, accelerator: Accelerator, stream_id: int, device_index: int, device_type: int) -> None:
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type
        self._accelerator = accelerator
        self._before: int | None = None

    def __enter__(self) -> PooledStream:
        if self._before is not None:
            raise RuntimeError("Stream's context should not be initialized.")
        self._before = self._accelerator.current
        self._accelerator.select(self.device_index)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._before is not None
        self._accelerator.select(self._before)
        self._before = None

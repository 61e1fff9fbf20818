"""Transfers of one device beside the model's kernels: copies must not queue behind kernels, nor kernels behind copies.

Everything that a publish does on a device goes through a `Lane`, so its order can be tested without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Lane(Protocol):
    """Work in the order in which it was queued. The host knows of an end only by ``synchronize``."""

    @property
    def device(self) -> torch.device: ...

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros on the host, in memory that the device copies from and to by itself."""
        ...

    def twin(self, host: Tensor) -> Tensor:
        """Memory on the device for the content of ``host``."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host and device; neither may be touched before ``synchronize``."""
        ...

    def queue(self) -> AbstractContextManager[object]:
        """Context in which a library, for example NCCL, queues its own work."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        ...


LaneFactory = Callable[[torch.device], Lane | None]
"""None where host code reaches the device's memory."""


class StreamLane:
    """A stream of the device, whatever kind of accelerator it is."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.Stream(device=device)

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def twin(self, host: Tensor) -> Tensor:
        return torch.empty_like(host, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._stream:
            target.copy_(source, non_blocking=True)

    def queue(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = self._stream
        return stream

    def synchronize(self) -> None:
        self._stream.synchronize()


def lane_of(device: torch.device) -> Lane | None:
    return None if device.type == "cpu" else StreamLane(device)

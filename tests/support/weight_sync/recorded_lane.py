"""A device's lane without a device: the host's memory plays both parts, and nothing is done before it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


class RecordedLane:
    """A `platforms.device.Lane` that writes into ``calls`` what is asked of it.

    A copy happens in ``synchronize`` and not before: whoever reads earlier finds old bytes. A library that works on
    the host (gloo) begins in ``queue`` at once, so the copies queued before it happen there.
    """

    def __init__(self, calls: list[str], device: torch.device, own: Sequence[Tensor] = ()) -> None:
        """``own`` is memory of the device."""
        self.calls, self.device, self._own = calls, device, {t.untyped_storage().data_ptr() for t in own}
        self._queued: list[Callable[[], object]] = []

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def twin(self, host: Tensor) -> Tensor:
        return torch.empty_like(host)

    def reaches(self, memory: Tensor) -> bool:
        return memory.untyped_storage().data_ptr() in self._own

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.calls.append("copy")
        self._queued.append(lambda: target.copy_(source))

    def queue(self) -> AbstractContextManager[object]:
        return self._begin()

    @contextmanager
    def _begin(self) -> Iterator[None]:
        self._do()
        self.calls.append("queue")
        yield

    def synchronize(self) -> None:
        self._do()
        self.calls.append("synchronize")

    def _do(self) -> None:
        queued, self._queued = self._queued, []
        for step in queued:
            step()

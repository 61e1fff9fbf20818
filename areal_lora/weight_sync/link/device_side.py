"""Broadcasts whose library works on a device: memory there, and the one thread that calls the library."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist

from areal_lora.platforms.lane import Lane
from areal_lora.processes.watched import watched_thread


@dataclass(frozen=True, slots=True)
class PendingBroadcast:
    """A broadcast that the library has taken, ``at`` (time.monotonic)."""

    work: dist.Work
    at: float

    @classmethod
    def now(cls, work: dist.Work) -> PendingBroadcast:
        return cls(work, time.monotonic())


class DeviceSide:
    """Twins of host buffers on the device, and the calls into the library, in order.

    NCCL forms a communicator inside the call that issues the first broadcast. It waits there for members without
    regard to a time-out, and an abort need not end it. Therefore no other thread makes these calls: theirs is to
    wait, up to their deadlines. A call that never returns costs this one thread.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane, self._memory = lane, dict[int, torch.Tensor]()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        watched_thread("device-broadcasts", self._run)

    def twin(self, flat: torch.Tensor) -> torch.Tensor:
        """Device memory as long as ``flat``, the same memory for buffers that start at the same address."""
        held = self._memory.get(flat.data_ptr())
        if held is None or held.numel() < flat.numel():
            held = self._memory[flat.data_ptr()] = self.lane.twin(flat)
        return held[: flat.numel()]

    def issue(self, call: Callable[[], dist.Work]) -> Future[PendingBroadcast]:
        """Have ``call`` made after all earlier ones."""
        made: Future[PendingBroadcast] = Future()

        def make() -> None:
            try:
                made.set_result(PendingBroadcast.now(call()))
            except BaseException as e:  # fault boundary: the waiting caller gets the error  # noqa: BLE001
                made.set_exception(e)

        self._calls.put(make)
        return made

    def close(self) -> None:
        """No ``issue`` may follow."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or it would keep the memory of a broadcast until the next one

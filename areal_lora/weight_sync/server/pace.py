"""When staging writes a version: spread over its time budget while no one waits, at once as soon as someone does.

    trainer waits for nothing    | slice 0 |  rest  | slice 1 |  rest  | slice 2 | ...   until the budget's end
    Hurry                                      ^ the rest ends, the rest of the version is written in one piece

A budget, not a share of a core: the time of a publish does not depend on the size of the version, and a slice that
came late (a busy machine, bytes not there yet) is made up for without rests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import Bucket

SLICE_BYTES = 1 << 20
"""Written without a rest: some tenths of a millisecond, which generation on the same core does not notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePlan:
    """Write ``nbytes`` evenly over the time from ``begin`` to ``end`` (one clock, seconds)."""

    begin: float
    end: float
    nbytes: int

    @classmethod
    def of(cls, pace_s: float, nbytes: int, now: float, deadline: float) -> PacePlan:
        """``pace_s`` from ``now``, but at most half of the time until ``deadline``, when the version is dropped."""
        return cls(begin=now, end=now + max(min(pace_s, (deadline - now) / 2), 0.0), nbytes=nbytes)

    def rest_s(self, written: int, now: float) -> float:
        """Seconds until the slice after ``written`` bytes is due; 0 if it is late."""
        due = self.begin + (self.end - self.begin) * written / max(self.nbytes, 1)
        return max(due - now, 0.0)


class Hurry:
    """The version that the trainer waits for, which may become known before the version does. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: AdapterRef | None = None
        self._staging: AdapterRef | None = None
        self._awaits = threading.Event()

    def begin(self, ref: AdapterRef) -> threading.Event:
        """Begin to stage ``ref``; the event is set as soon as the trainer waits for it."""
        with self._lock:
            self._staging, self._awaits = ref, threading.Event()
            if self._awaited == ref:
                self._awaits.set()
            return self._awaits

    def awaited(self, ref: AdapterRef) -> None:
        """The trainer waits for ``ref``."""
        with self._lock:
            self._awaited = ref
            if self._staging == ref:
                self._awaits.set()


class Pace:
    """Rest between the slices of one version as ``plan`` says, until ``awaits`` is set. No plan: never rest."""

    def __init__(
        self, plan: PacePlan | None, awaits: threading.Event, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plan, self._awaits, self._clock = plan, awaits, clock
        self._written = 0

    def slices(self, ends: np.ndarray, bucket: Bucket) -> Iterator[tuple[int, int]]:
        """Cut a bucket between tensors into slices [first, last), each due when it is yielded.

        ``ends`` are those of all tensors of the shard (``TensorTable``). The caller writes a slice before it takes
        the next one. Without a plan, or once someone waits, the rest of the bucket is one slice.
        """
        first, begin = bucket.first, bucket.begin
        while first < bucket.last:
            last = bucket.last
            if self._plan is not None and not self._awaits.wait(self._plan.rest_s(self._written, self._clock())):
                last = min(int(np.searchsorted(ends, begin + SLICE_BYTES)) + 1, bucket.last)
            yield first, last
            end = int(ends[last - 1])
            self._written += end - begin
            first, begin = last, end

"""Measure the phases of a step as named spans of a monotonic clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """Seconds by phase. Repeated spans of one name add up; spans may nest. Not thread-safe.

    Example::

        spans = Spans()
        with spans.span("train"):
            ...
        record = StepRecord(..., spans=dict(spans.seconds))
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time spent in the block to ``seconds[name]``, also when the block raises."""
        started = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add a time that was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def total_s(self) -> float:
        """Wall seconds since construction or the last restart (not the sum of the spans)."""
        return self._clock() - self._started

    def restart(self) -> dict[str, float]:
        """Return the spans so far and start the next step without spans."""
        finished, self.seconds = self.seconds, {}
        self._started = self._clock()
        return finished

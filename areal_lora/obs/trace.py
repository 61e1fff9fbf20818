"""Measure the phases of a step as named spans of a monotonic clock, and count what was done in them."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Spans:
    """Seconds by phase, and ``counts``. Repeated spans of one name add up; spans may nest. Not thread-safe.

    ``label`` gives a context for each span's name: that of a profiler.

    Example::

        spans = Spans()
        with spans.span("train"):
            ...
        record = StepRecord(..., spans=dict(spans.seconds))
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        label: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._clock, self._label = clock, label
        self._started = clock()
        self.seconds: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time spent in the block to ``seconds[name]``, also when the block raises."""
        started = self._clock()
        try:
            with self._label(name):
                yield
        finally:
            self.add(name, self._clock() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add a time that was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self, other: "Spans") -> None:
        """Move times and counts of ``other`` here, and restart it."""
        self.counts.update(other.counts)
        for name, seconds in other.restart().items():
            self.add(name, seconds)

    @property
    def total_s(self) -> float:
        """Wall seconds since construction or the last restart (not the sum of the spans)."""
        return self._clock() - self._started

    def restart(self) -> dict[str, float]:
        """Return the spans so far and start the next step without spans and counts."""
        finished, self.seconds, self.counts = self.seconds, {}, Counter()
        self._started = self._clock()
        return finished

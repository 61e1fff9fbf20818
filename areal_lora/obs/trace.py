"""Measure the phases of a step as named spans of a monotonic clock, count what was done in them, record traces."""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from areal_lora.processes.log import get_logger

log = get_logger(__name__)


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
        self.add_share(other, 1)
        other.restart()

    def add_share(self, other: "Spans", share: float) -> None:
        """Add a ``share`` of the times and counts of ``other``."""
        self.counts.update({name: share * count for name, count in other.counts.items()})
        for name, seconds in other.seconds.items():
            self.add(name, share * seconds)

    @property
    def total_s(self) -> float:
        """Wall seconds since construction or the last restart (not the sum of the spans)."""
        return self._clock() - self._started

    def restart(self) -> dict[str, float]:
        """Return the spans so far and start the next step without spans and counts."""
        finished, self.seconds, self.counts = self.seconds, {}, Counter()
        self._started = self._clock()
        return finished


@contextmanager
def waiting(steps: Iterable[Spans], name: str) -> Iterator[None]:
    """Add the time spent in the block to all ``steps`` in progress: those of adapters none of which is trained."""
    with ExitStack() as block:
        for spans in steps:
            block.enter_context(spans.span(name))
        yield


def profiled(steps: Container[int], folder: Path, adapter: str, step: int, rank: int) -> AbstractContextManager[None]:
    """Context of training step ``step`` (from 1) of ``adapter``; of ``steps`` rank 0 writes a trace to ``folder``.

    The spans of the step and the passes of each micro-batch are its ranges (`platforms.device.profiler_range`).
    """
    if step not in steps or rank != 0:
        return nullcontext()
    return _recorded(folder / f"{adapter}-step-{step}-rank-{rank}.json.gz")


@contextmanager
def _recorded(trace: Path) -> Iterator[None]:
    from torch.profiler import profile  # not for commands, which import this package

    with profile() as recorded:
        yield
    try:
        trace.parent.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(trace))
    except OSError as error:
        log.warning("%s was not written: %s; the run continues", trace, error)
    else:
        log.info("wrote %s; open it in https://ui.perfetto.dev", trace)

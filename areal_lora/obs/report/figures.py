"""Accumulate the figures of summary and report, one record at a time: of the run, and of each adapter.

Memory grows by four numbers per version, which the medians need.

Hold curves of any number of points in bounded memory.

Points fall into buckets of equal width in x. A bucket is one step or version at first. When the number of buckets
exceeds the limit, the width doubles and neighbours are merged.

- A line (`Curve`) keeps the first, lowest, highest and last point of each bucket: a spike of one step stays visible.
- A mean (`Means`: bars, smoothed lines) is the mean over all points of the bucket.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import (
    AdapterStateRecord,
    CheckpointRecord,
    EvalRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    RolloutSampleRecord,
    StepRecord,
    mean_lag,
)
from areal_lora.obs.report import svg
from areal_lora.run_folder.paths import RunFolder

SAMPLES_KEPT = 4
"""Number of early samples kept, and of late ones."""


def largest(values: Iterable[float | None]) -> float | None:
    """The largest measured value; None if there is none."""
    return max((v for v in values if v is not None), default=None)


class Figures:
    """``add`` valid records (`iter_metrics`) of one adapter, or of all, in any order of steps and versions."""

    def __init__(self) -> None:
        self.steps = 0
        self.last_step: StepRecord | None = None
        self.last_by_adapter: dict[str, StepRecord] = {}
        """The latest step of each adapter; it holds the counts since the start."""
        self.staleness: Counter[int] = Counter()
        """Trained tokens by versions of lag."""
        self.trained_tokens = 0
        self.speeds = array("d")
        self.publishes = 0
        self.publishes_probed = 0
        self.publish_ms = array("d")
        self.probe_max_abs: float | None = None
        self.probe_mean_abs: float | None = None
        self.checkpoint_bytes: dict[str, int] = {}
        self.checkpoints_failed: Counter[str] = Counter()
        self.resumes: list[ResumeRecord] = []
        self.recorded: AdapterStateRecord | None = None
        """The newest state since the last resume."""
        self.early: list[RolloutSampleRecord] = []
        self.late: deque[RolloutSampleRecord] = deque(maxlen=SAMPLES_KEPT)
        self.best_eval: EvalRecord | None = None
        """Of the first set: highest accuracy, then highest mean reward, then the newest version."""
        self._evals: list[EvalRecord] = []
        self.sets: dict[tuple[str, str], list[EvalRecord]] = {}
        """By adapter and name of a set: its first and last evaluation without samples, one if there is one."""

    @property
    def evals(self) -> list[EvalRecord]:
        """The first and last evaluation of the first set without samples; fewer if the run has fewer."""
        return self._evals

    @property
    def max_staleness(self) -> int | None:
        return max((lag for lag, n in self.staleness.items() if n), default=None)

    @property
    def mean_lag(self) -> float | None:
        return mean_lag(self.staleness)

    def add(self, record: Record) -> None:
        match record:
            case StepRecord():
                self._add_step(record)
            case PublishRecord():
                self._add_publish(record)
            case EvalRecord():
                bare = msgspec.structs.replace(record, samples=[])
                key = (record.adapter, record.name)
                self.sets[key] = _ends([*self.sets.get(key, ()), bare])
                if record.order == 0:
                    self._evals = _ends([*self._evals, bare])
                    self.best_eval = max((e for e in (self.best_eval, bare) if e is not None), key=_quality)
            case CheckpointRecord(failed=True):
                self.checkpoints_failed[record.adapter] += 1
            case CheckpointRecord():
                self.checkpoint_bytes[record.adapter] = record.nbytes
            case RolloutSampleRecord():
                (self.early if len(self.early) < SAMPLES_KEPT else self.late).append(record)
            case ResumeRecord():
                self.resumes.append(record)
                self.recorded = None
            case AdapterStateRecord():
                self.recorded = record

    def _add_step(self, record: StepRecord) -> None:
        self.steps += record.taken
        self.trained_tokens += record.trained_tokens
        if self.last_step is None or record.time_s >= self.last_step.time_s:
            self.last_step = record
        self.last_by_adapter[record.adapter] = record
        self.staleness.update(record.staleness)
        if (rate := record.metrics.get("train/rollout_tokens_per_s")) is not None:
            self.speeds.append(rate)

    def _add_publish(self, record: PublishRecord) -> None:
        self.publishes += 1
        self.publishes_probed += record.probe_max_abs is not None
        if record.total_ms is not None:
            self.publish_ms.append(record.total_ms)
        self.probe_max_abs = largest([self.probe_max_abs, record.probe_max_abs])
        self.probe_mean_abs = largest([self.probe_mean_abs, record.probe_mean_abs])


class RunFigures:
    """Figures of the run in ``total``, of each of ``adapters`` by name; a run with one has the same for both."""

    def __init__(self, adapters: Sequence[str]) -> None:
        self.total = Figures()
        several = len(adapters) != 1
        self.adapters = {name: Figures() if several else self.total for name in adapters}

    def add(self, record: Record) -> None:
        self.total.add(record)
        if len(self.adapters) > 1 and record.adapter in self.adapters:
            self.adapters[record.adapter].add(record)

    def share(self, name: str) -> float:
        """The adapter's part of all trained tokens; 0 before the first step."""
        tokens = self.total.trained_tokens
        return self.adapters[name].trained_tokens / tokens if tokens else 0.0


def _quality(record: EvalRecord) -> tuple[float, float, int]:
    accuracy, reward = (-math.inf if v is None else v for v in (record.accuracy, record.reward_mean))
    return accuracy, reward, record.version


def _ends(records: list[EvalRecord]) -> list[EvalRecord]:
    """The first and the last one."""
    ordered = sorted(records, key=lambda e: (e.version, e.step))
    return [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered


def read_figures(run_folder: RunFolder | Path | str, adapters: Sequence[str]) -> RunFigures:
    """The figures of a run that trains ``adapters``."""
    figures = RunFigures(adapters)
    for record in iter_metrics(run_folder):
        figures.add(record)
    return figures


BUCKETS = 320
"""Half the width of a plot in pixels; more buckets would not be visible."""
Point = tuple[float, float]


class Curve:
    """Iterates over the kept points in order of x."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._most = buckets
        self._width = 1.0
        self._buckets: dict[float, list[Point]] = {}  # first, lowest, highest, last

    def add(self, x: float, y: float) -> None:
        """``x`` may come in any order; ``y`` is finite."""
        self._put(x, y)
        while len(self._buckets) > self._most:
            self._width *= 2
            points, self._buckets = list(self), {}
            for point in points:
                self._put(*point)

    def _put(self, x: float, y: float) -> None:
        place, point = x // self._width, (x, y)
        bucket = self._buckets.get(place)
        if bucket is None:
            self._buckets[place] = [point] * 4
            return
        if x < bucket[0][0]:
            bucket[0] = point
        if y < bucket[1][1]:
            bucket[1] = point
        if y > bucket[2][1]:
            bucket[2] = point
        if x >= bucket[3][0]:
            bucket[3] = point

    def __iter__(self) -> Iterator[Point]:
        for _, bucket in sorted(self._buckets.items()):
            yield from sorted(set(bucket))


class Means:
    """Averages rows of values over x by bucket; all rows have the same length."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._most = buckets
        self._width = 1.0
        self._buckets: dict[float, list[float]] = {}  # number of rows, sum of x, sums of the values

    def add(self, x: float, values: Sequence[float]) -> None:
        self._put(x // self._width, [1.0, x, *values])
        while len(self._buckets) > self._most:
            self._width *= 2
            sums, self._buckets = list(self._buckets.values()), {}
            for row in sums:
                self._put(row[1] / row[0] // self._width, row)

    def _put(self, place: float, sums: list[float]) -> None:
        bucket = self._buckets.get(place)
        self._buckets[place] = sums if bucket is None else [a + b for a, b in zip(bucket, sums, strict=True)]

    def rows(self) -> list[tuple[float, list[float]]]:
        """(mean x, mean values) by bucket, in order of x."""
        return [(sums[1] / sums[0], [v / sums[0] for v in sums[2:]]) for _, sums in sorted(self._buckets.items())]


class MovingMean:
    """The moving mean of a `Means` of one value, over a twelfth of the run."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def __iter__(self) -> Iterator[Point]:
        points = [(x, values[0]) for x, values in self._means.rows()]
        return iter(svg.moving_mean(points, max(3, len(points) // 12)))

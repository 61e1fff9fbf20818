"""Accumulate the figures of summary and report, one record at a time.

Memory grows by two numbers per version, which the medians need.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import (
    CheckpointRecord,
    EvalRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    RolloutSampleRecord,
    StepRecord,
    mean_lag,
)
from areal_lora.run_folder.paths import RunFolder

SAMPLES_KEPT = 4
"""Number of early samples kept, and of late ones."""


def largest(values: Iterable[float | None]) -> float | None:
    """The largest measured value; None if there is none."""
    return max((v for v in values if v is not None), default=None)


class Figures:
    """``add`` valid records (`iter_metrics`) in any order of steps and versions."""

    def __init__(self) -> None:
        self.steps = 0
        self.last_step: StepRecord | None = None
        self.last_by_adapter: dict[str, StepRecord] = {}
        """The latest step of each adapter; it holds the counts since the start."""
        self.staleness: Counter[int] = Counter()
        """Trained tokens by versions of lag."""
        self.speeds = array("d")
        self.publishes = 0
        self.publishes_probed = 0
        self.publish_ms = array("d")
        self.probe_max_abs: float | None = None
        self.probe_mean_abs: float | None = None
        self.checkpoint_bytes: dict[str, int] = {}
        self.checkpoints_failed: Counter[str] = Counter()
        self.resumes: list[ResumeRecord] = []
        self.early: list[RolloutSampleRecord] = []
        self.late: deque[RolloutSampleRecord] = deque(maxlen=SAMPLES_KEPT)
        self._evals: list[EvalRecord] = []

    @property
    def evals(self) -> list[EvalRecord]:
        """The first and last evaluation without samples; fewer if the run has fewer."""
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
                kept = [*self._evals, msgspec.structs.replace(record, samples=[])]
                kept.sort(key=lambda e: (e.version, e.step))
                self._evals = [kept[0], kept[-1]] if len(kept) > 1 else kept
            case CheckpointRecord(failed=True):
                self.checkpoints_failed[record.adapter] += 1
            case CheckpointRecord():
                self.checkpoint_bytes[record.adapter] = record.nbytes
            case RolloutSampleRecord():
                (self.early if len(self.early) < SAMPLES_KEPT else self.late).append(record)
            case ResumeRecord():
                self.resumes.append(record)

    def _add_step(self, record: StepRecord) -> None:
        self.steps += 1
        if self.last_step is None or record.step >= self.last_step.step:
            self.last_step = record
        self.last_by_adapter[record.adapter] = record
        self.staleness.update(record.staleness)
        if record.rollout_tokens_per_s is not None:
            self.speeds.append(record.rollout_tokens_per_s)

    def _add_publish(self, record: PublishRecord) -> None:
        self.publishes += 1
        self.publishes_probed += record.probe_max_abs is not None
        if record.total_ms is not None:
            self.publish_ms.append(record.total_ms)
        self.probe_max_abs = largest([self.probe_max_abs, record.probe_max_abs])
        self.probe_mean_abs = largest([self.probe_mean_abs, record.probe_mean_abs])


def read_figures(run_folder: RunFolder | Path | str) -> Figures:
    figures = Figures()
    for record in iter_metrics(run_folder):
        figures.add(record)
    return figures

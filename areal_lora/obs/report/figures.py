"""Accumulate the figures of summary and report, one record at a time: of the run, and of each adapter.

Memory grows by four numbers per version, which the medians need.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Sequence
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
from areal_lora.run_folder.paths import RunFolder

SAMPLES_KEPT = 4
"""Number of early samples kept, and of late ones."""


def _largest(*values: float | None) -> float | None:
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
        self.evals: list[EvalRecord] = []
        """The first and last evaluation of the first set without samples; fewer if the run has fewer."""
        self.sets: dict[tuple[str, str], list[EvalRecord]] = {}
        """By adapter and name of a set: its first and last evaluation without samples, one if there is one."""

    @property
    def max_staleness(self) -> int | None:
        return max((lag for lag, n in self.staleness.items() if n), default=None)

    @property
    def mean_lag(self) -> float | None:
        return mean_lag(self.staleness)

    def add(self, record: Record) -> None:
        match record:
            case StepRecord():
                self.steps += record.taken
                self.trained_tokens += record.trained_tokens
                if self.last_step is None or record.time_s >= self.last_step.time_s:
                    self.last_step = record
                self.last_by_adapter[record.adapter] = record
                self.staleness.update(record.staleness)
                if (rate := record.metrics.get("train/rollout_tokens_per_s")) is not None:
                    self.speeds.append(rate)
            case PublishRecord():
                self.publishes += 1
                self.publishes_probed += record.probe_max_abs is not None
                if record.total_ms is not None:
                    self.publish_ms.append(record.total_ms)
                self.probe_max_abs = _largest(self.probe_max_abs, record.probe_max_abs)
                self.probe_mean_abs = _largest(self.probe_mean_abs, record.probe_mean_abs)
            case EvalRecord():
                bare = msgspec.structs.replace(record, samples=[])
                key = (record.adapter, record.name)
                self.sets[key] = _ends([*self.sets.get(key, ()), bare])
                if record.order == 0:
                    self.evals = _ends([*self.evals, bare])
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

"""Follow ``metrics.jsonl``: the records that count, each once, when no crash can undo them any more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from areal_lora.obs.metrics.reader import MetricsTail, mark_of
from areal_lora.obs.metrics.records import (
    AdapterStateRecord,
    CheckpointRecord,
    MembersRecord,
    Record,
    ResumeRecord,
    StepRecord,
)
from areal_lora.obs.metrics.undone import Undone
from areal_lora.obs.tracking.tracker import Row
from areal_lora.run_folder.paths import RunFolder

HOLD_S = 120.0
"""The longest wait of a step for the checkpoint that contains it."""


@dataclass(slots=True)
class _Unsaved:
    """A step that no checkpoint contains yet."""

    line: int
    step: int
    seen_s: float


@dataclass(slots=True)
class _Held:
    """The unsaved steps of each adapter, oldest first."""

    steps: dict[str, deque[_Unsaved]] = field(default_factory=dict)

    def see(self, line: int, record: Record, now_s: float) -> None:
        match record:
            case StepRecord(adapter=adapter, step=step):
                self.steps.setdefault(adapter, deque()).append(_Unsaved(line=line, step=step, seen_s=now_s))
            case CheckpointRecord(adapter=adapter, version=version, failed=False):
                unsaved = self.steps.get(adapter, deque())
                while unsaved and unsaved[0].step < version:
                    unsaved.popleft()
            case ResumeRecord(adapter=adapter):
                self.steps.pop(adapter, None)  # each step before it is in its checkpoint, or void

    def first(self, now_s: float) -> int | None:
        """The line of the first step that is still to wait; None if none is."""
        for unsaved in self.steps.values():
            while unsaved and now_s - unsaved[0].seen_s >= HOLD_S:
                unsaved.popleft()
        return min((unsaved[0].line for unsaved in self.steps.values() if unsaved), default=None)


class Follower:
    """Reads the file twice: far ahead to find out what counts, then up to the first step that may still be undone.

    A run that crashes resumes from its newest checkpoint and repeats the steps after it. So a step, and all lines after
    it, wait for a checkpoint that contains it, at most ``HOLD_S``. Lines up to ``sent`` are skipped. Memory does not
    grow with the file.
    """

    def __init__(self, run_folder: RunFolder, sent: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._ahead, self._behind = MetricsTail(run_folder), MetricsTail(run_folder)
        self._sent, self._clock = sent, clock
        self._undone, self._held = Undone(), _Held()
        self._known = self._line = 0
        self._waiting: deque[Record] = deque()
        self._time_s = 0.0

    def read_new(self, *, everything: bool = False) -> Iterator[Row]:
        """The rows since the last call. ``everything``: the run is over, nothing waits any more.

        Raises ConfigError with file and line for a line that is not a record.
        """
        self._look_ahead()
        first = None if everything else self._held.first(self._clock())
        end = self._known if first is None else first - 1
        while self._line < end:
            if not self._waiting:
                self._waiting.extend(self._behind.read_new())
            record = self._waiting.popleft()
            self._line += 1
            if isinstance(record, StepRecord | ResumeRecord | MembersRecord | AdapterStateRecord):
                self._time_s = max(self._time_s, record.time_s)
            if self._line > self._sent and self._undone.holds(self._line, mark_of(record)):
                yield Row(line=self._line, time_s=self._time_s, record=record)

    def _look_ahead(self) -> None:
        now_s = self._clock()
        while records := self._ahead.read_new():
            for record in records:
                self._known += 1
                self._undone.note(self._known, mark_of(record))
                self._held.see(self._known, record, now_s)

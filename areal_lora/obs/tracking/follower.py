"""Bring a run to a tracker: all that is recorded, then what is new, until the run has ended.

`MetricsFollower` reads the records that count, each once, when no crash can undo them any more.
"""

from __future__ import annotations

import fcntl
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.reader import MetricsTail, mark_of
from areal_lora.obs.metrics.records import (
    AdapterStateRecord,
    CheckpointRecord,
    MembersRecord,
    Record,
    ResumeRecord,
    StepRecord,
)
from areal_lora.obs.metrics.void import VoidRecords
from areal_lora.obs.report.page import report_page
from areal_lora.obs.report.summary import read_summary
from areal_lora.obs.tracking.public_config import public_json
from areal_lora.obs.tracking.tracker import Ending, MetricsRow, Tracker
from areal_lora.run_folder.paths import RunFolder

POLL_S = 1.0
ROWS = 200
"""Rows that a tracker gets at a time."""
HOLD_S = 120.0
"""The longest wait of a step for the checkpoint that contains it."""


@dataclass(slots=True)
class _UnsavedStep:
    """A step that no checkpoint contains yet."""

    line: int
    step: int
    seen_s: float


@dataclass(slots=True)
class _UnsavedSteps:
    """The unsaved steps of each adapter, oldest first."""

    steps: dict[str, deque[_UnsavedStep]] = field(default_factory=dict)

    def see(self, line: int, record: Record, now_s: float) -> None:
        match record:
            case StepRecord(adapter=adapter, step=step):
                self.steps.setdefault(adapter, deque()).append(_UnsavedStep(line=line, step=step, seen_s=now_s))
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


class MetricsFollower:
    """Reads the file twice: far ahead to find out what counts, then up to the first step that may still be undone.

    A run that crashes resumes from its newest checkpoint and repeats the steps after it. So a step, and all lines after
    it, wait for a checkpoint that contains it, at most ``HOLD_S``. Lines up to ``sent`` are skipped. Memory does not
    grow with the file.
    """

    def __init__(self, run_folder: RunFolder, sent: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._ahead, self._behind = MetricsTail(run_folder), MetricsTail(run_folder)
        self._sent, self._clock = sent, clock
        self._undone, self._held = VoidRecords(), _UnsavedSteps()
        self._known = self._line = 0
        self._waiting: deque[Record] = deque()
        self._time_s = 0.0

    def read_new(self, *, everything: bool = False) -> Iterator[MetricsRow]:
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
                yield MetricsRow(line=self._line, time_s=self._time_s, record=record)

    def _look_ahead(self) -> None:
        now_s = self._clock()
        while records := self._ahead.read_new():
            for record in records:
                self._known += 1
                self._undone.note(self._known, mark_of(record))
                self._held.see(self._known, record, now_s)


def follow(
    folder: RunFolder,
    tracker: Tracker,
    ended: Callable[[], str | None],
    *,
    wait: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Send what ``tracker`` does not hold. ``ended`` returns how the run has ended, None: it has not.

    Returns that at the end. Without ``wait`` it sends what is there once. The tracker learns of an interrupt, too.
    """
    follower = MetricsFollower(folder, tracker.held())
    try:
        while True:
            state = ended()  # before reading: nothing is written after the end
            rows = follower.read_new(everything=state is not None)
            while some := list(islice(rows, ROWS)):
                tracker.send(some)
            if state is not None or not wait:
                break
            sleep(POLL_S)
    except KeyboardInterrupt:
        tracker.end(None)
        raise
    tracker.end(None if state is None else ending(folder, state))
    return state


def ending(folder: RunFolder, state: str) -> Ending:
    summary: dict[str, Any] = read_summary(folder).values() if folder.summary.is_file() else {}
    return Ending(state=state, summary=summary, report=report_page(folder, public_json))


@contextmanager
def only_one(folder: RunFolder, tracker: str) -> Iterator[None]:
    """Raise ConfigError where another process sends the run to ``tracker``.

    Where the folder cannot be written or locked, it is not found out.
    """
    try:
        folder.tracking.mkdir(exist_ok=True)
        file = (folder.tracking / f"{tracker}.lock").open("ab")
    except OSError:
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "leave it to the other one, or stop that one first"
            raise ConfigError(str(folder), f"another process sends this run to {tracker}", fix) from None
        except OSError:
            pass  # no flock on this file system
        yield

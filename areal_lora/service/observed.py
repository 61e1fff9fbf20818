"""What the run has: the records of ``metrics.jsonl`` by adapter, read as they come."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from areal_lora.obs.metrics.records import AdapterStateRecord, CheckpointRecord, PublishRecord, ResumeRecord, StepRecord
from areal_lora.run_folder.events import whole_lines
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase

READ_BYTES = 4 << 20
PAGE = 1000
"""Most records of one answer."""


class _Head(msgspec.Struct, frozen=True):
    kind: str
    adapter: str = ""


_head = msgspec.json.Decoder(_Head).decode
_state = msgspec.json.Decoder(AdapterStateRecord | StepRecord | PublishRecord | CheckpointRecord | ResumeRecord).decode
_KINDS = ("state", "step", "publish", "checkpoint", "resume")


@dataclass(slots=True)
class ObservedAdapter:
    """One adapter of the run. ``places`` are the offsets of its lines, ``states`` those of its newest state records.

    ``version`` is the newest one that servers hold, ``checkpoint`` the newest one written since the last resume.
    """

    phase: AdapterPhase | None = None
    reason: str = ""
    step: StepRecord | None = None
    version: int | None = None
    checkpoint: int | None = None
    places: array[int] = field(default_factory=lambda: array("Q"))
    states: deque[int] = field(default_factory=lambda: deque(maxlen=PAGE))


class RunObserver:
    """Follows one file. ``look`` reads what has come; the rest answers from memory and, for lines, from the file."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._path, self._at = run_folder.metrics, 0
        self._seen: dict[str, ObservedAdapter] = {}

    def look(self) -> bool:
        """Read new records, at most about ``READ_BYTES``; False where those were all. A torn line stays."""
        end = self._at + READ_BYTES
        with suppress(FileNotFoundError):
            for line in whole_lines(self._path, end, self._at):
                self._take(line, self._at)
                self._at += len(line)
        return self._at >= end

    def of(self, key: str) -> ObservedAdapter:
        return self._seen.get(key) or ObservedAdapter()

    def phases(self) -> dict[str, AdapterPhase]:
        return {key: seen.phase for key, seen in list(self._seen.items()) if seen.phase is not None}

    def records(self, key: str, after: int, limit: int = PAGE) -> list[dict[str, Any]]:
        """The adapter's records from number ``after`` on, without the run's names of adapters."""
        return self._lines(self.of(key).places[after : after + limit])

    def states(self, key: str) -> list[dict[str, Any]]:
        """The newest state records and failures of the adapter, oldest first."""
        return self._lines(self.of(key).states)

    def forget(self, but: Container[str]) -> None:
        """Forget every adapter that is not in ``but``."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in but}

    def _lines(self, places: Iterable[int]) -> list[dict[str, Any]]:
        if not (offsets := list(places)):
            return []
        found = []
        with self._path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                record = msgspec.json.decode(file.readline(), type=dict[str, Any])
                for name_of_the_run in ("adapter", "measured_with"):
                    record.pop(name_of_the_run, None)
                found.append(record)
        return found

    def _take(self, line: bytes, offset: int) -> None:
        head = _head(line)
        if not head.adapter:
            return
        seen = self._seen.setdefault(head.adapter, ObservedAdapter())
        seen.places.append(offset)
        if head.kind not in _KINDS:
            return
        match _state(line):
            case AdapterStateRecord(state=phase, reason=reason):
                seen.phase, seen.reason = phase, reason
                seen.states.append(offset)
            case StepRecord() as step:
                seen.step = step
            case PublishRecord(version=version):
                seen.version = version
            case CheckpointRecord(version=version, failed=failed):
                seen.checkpoint = seen.checkpoint if failed else version
            case ResumeRecord(version=version):
                seen.checkpoint = version
                if seen.step is not None and seen.step.version >= version:
                    seen.step = None  # it will come again

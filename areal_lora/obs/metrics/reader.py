"""Read the records of a run: all valid records (`iter_metrics`, `read_metrics`) or only new ones (`MetricsTail`).

Find the void records of a metrics file: one pass to note every record, a second pass to filter.

A resumed run repeats steps: its ``resume`` record voids earlier records of later versions of the adapter. Of several
records of one kind and version the last one counts. Memory grows with resumes and repeats, not with records.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_lora.config.sections.task import DEFAULT_SET
from areal_lora.errors import ConfigError
from areal_lora.obs.metrics import records
from areal_lora.run_folder.events import whole_lines
from areal_lora.run_folder.paths import RunFolder

BEFORE = frozenset({"step"})
"""Kinds whose ``index`` is the version that they start from; the ``index`` of every other kind is one that was made."""
RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The identity of a record. ``what`` separates records of one kind and index; None: the record has no repeats."""

    kind: str
    adapter: str
    index: int
    what: Hashable | None = ""


class VoidRecords:
    """First pass: ``note`` every record with its place in the file, in order. Second pass: filter by ``holds``."""

    def __init__(self) -> None:
        # By adapter, (place, version) of the effective resumes, ascending in both: a later resume from an older
        # version voids everything that an earlier one does.
        self._resumes: dict[str, list[tuple[int, int]]] = {}
        self._highest: dict[tuple[str, str, Hashable], int] = {}
        self._last: dict[tuple[str, str, Hashable, int], int] = {}

    def note(self, place: int, mark: Mark) -> None:
        if mark.kind == RESUME:
            self._resume(place, mark)
        elif mark.what is not None:
            key = (mark.kind, mark.adapter, mark.what)
            highest = self._highest.get(key)
            if highest is None or mark.index > highest:
                self._highest[key] = mark.index  # no earlier record, or only void ones
            else:
                self._last[*key, mark.index] = place

    @property
    def nothing(self) -> bool:
        return not self._resumes and not self._last

    def holds(self, place: int, mark: Mark) -> bool:
        """Whether the record at ``place`` is valid. A resume always is."""
        if mark.kind == RESUME:
            return True
        resumes = self._resumes.get(mark.adapter, [])
        later = bisect_right(resumes, place, key=lambda entry: entry[0])
        if later < len(resumes) and mark.index > _last_valid(mark.kind, resumes[later][1]):
            return False
        return self._last.get((mark.kind, mark.adapter, mark.what, mark.index), place) <= place

    def _resume(self, place: int, mark: Mark) -> None:
        resumes = self._resumes.setdefault(mark.adapter, [])
        while resumes and resumes[-1][1] >= mark.index:
            resumes.pop()
        resumes.append((place, mark.index))
        for key, highest in self._highest.items():
            if key[1] == mark.adapter:
                self._highest[key] = min(highest, _last_valid(key[0], mark.index))


def _last_valid(kind: str, version: int) -> int:
    """The last index that stays valid after a resume from ``version``."""
    return version - 1 if kind in BEFORE else version


D = TypeVar("D")

TAIL_BYTES = 4 << 20


class MetricsTail:
    """Reads records appended to a metrics file since the previous call; a torn line stays for the next call."""

    def __init__(self, run_folder: RunFolder) -> None:
        self.path = run_folder.metrics
        self.offset = 0
        """Bytes that were read."""
        self._lines = 0

    def read_new(self) -> list[records.Record]:
        """The next whole records, at most about ``TAIL_BYTES``; call until the list is empty.

        Raises ConfigError with file and line for a line that is not a record, after those before it were returned; the
        next call continues behind it. Raises OSError.
        """
        found: list[records.Record] = []
        if not self.path.exists():
            return found
        for line in whole_lines(self.path, self.offset + TAIL_BYTES, self.offset):
            try:
                found.append(_decode(_RECORD, line, self.path, self._lines + 1))
            except ConfigError:
                if found:
                    break
                self._pass(line)
                raise
            self._pass(line)
        return found

    def _pass(self, line: bytes) -> None:
        self.offset += len(line)
        self._lines += 1


def newest_records(run_folder: RunFolder, nbytes: int = TAIL_BYTES) -> list[records.Record]:
    """The whole records in the last ``nbytes`` of the metrics file, oldest first; those before are not read.

    Records that a later resume made void are among them. Raises ConfigError for a line that is not a record.
    """
    path = run_folder.metrics
    if not path.exists():
        return []
    start = max(0, path.stat().st_size - nbytes - 1)
    lines = [*whole_lines(path, at=start)][start > 0 :]  # the first one is cut, or the end of the line before
    return [_decode(_RECORD, line, path, number) for number, line in enumerate(lines, 1)]


def state_records(run_folder: RunFolder) -> list[records.AdapterStateRecord | records.ResumeRecord]:
    """All states of adapters and the resumes between them, as written; of every other line only the kind is read.

    Raises ConfigError for a line that is not a record.
    """
    path = run_folder.metrics
    lines = enumerate(whole_lines(path), 1) if path.exists() else ()
    return [_decode(_STATE, line, path, number) for number, line in lines if line.startswith(_STATE_LINES)]


def recorded_s(run_folder: RunFolder) -> float:
    """The wall time of the last recorded step, void steps included; 0 before the first."""
    return max((head.time_s for _, head in _heads(run_folder.metrics) if head.kind == "step"), default=0.0)


def iter_metrics(run_folder: RunFolder | Path | str, until: int | None = None) -> Iterator[records.Record]:
    """Iterate over all valid records of ``metrics.jsonl`` in the order written, to byte ``until``.

    Records that a resume made void are skipped, which takes two passes over the file; records appended meanwhile are
    returned by the next call. Raises ConfigError with file and line for a line that is not a record.
    """
    folder = RunFolder.of(run_folder)
    path, undone, end = folder.metrics, VoidRecords(), 0
    for number, (nbytes, head) in enumerate(_heads(path, until), 1):
        undone.note(number, mark_of(head))
        end += nbytes
    if end:
        for number, line in enumerate(whole_lines(path, end), 1):
            record = _decode(_RECORD, line, path, number)
            if undone.nothing or undone.holds(number, mark_of(record)):
                yield record


def read_metrics(run_folder: RunFolder | Path | str) -> records.RunMetrics:
    """Load all records of `iter_metrics` into memory; empty if nothing was recorded."""
    found = records.RunMetrics()
    lists: dict[type[records.Record], list[Any]] = {
        records.StepRecord: found.steps,
        records.PublishRecord: found.publishes,
        records.EvalRecord: found.evals,
        records.CheckpointRecord: found.checkpoints,
        records.ResumeRecord: found.resumes,
        records.MembersRecord: found.members,
        records.AdapterStateRecord: found.states,
    }
    for record in iter_metrics(run_folder):
        lists[type(record)].append(record)
    found.steps.sort(key=records.position)
    found.publishes.sort(key=records.position)
    found.evals.sort(key=lambda e: (e.version, e.step, e.order))
    found.checkpoints.sort(key=records.position)
    return found


class _Head(msgspec.Struct, frozen=True):
    """The fields that the first pass needs; much cheaper to decode than a whole record."""

    kind: str
    adapter: str = ""
    step: int = 0
    version: int = 0
    tag: str = ""
    name: str = DEFAULT_SET
    time_s: float = 0.0


def mark_of(record: Any) -> Mark:
    """The identity of a `Record`, or of the `_Head` of one.

    A version has several changes of members, states, and an evaluation per tag and set; of every other kind one.
    """
    kind = record.kind if isinstance(record, _Head) else str(record.__struct_config__.tag)
    repeats = kind not in ("members", "state")
    what = f"{record.tag}/{record.name}" if kind == "eval" else "" if repeats else None
    return Mark(kind=kind, adapter=record.adapter, index=record.version, what=what)


_RECORD = msgspec.json.Decoder(records.Record)
_HEAD = msgspec.json.Decoder(_Head)
_STATE = msgspec.json.Decoder(records.AdapterStateRecord | records.ResumeRecord)
_STATE_LINES = (b'{"kind":"state"', b'{"kind":"resume"')
"""The start of these lines, as the writer has them."""


def _heads(path: Path, until: int | None = None) -> Iterator[tuple[int, _Head]]:
    """(bytes of the line, head) of each record of ``metrics.jsonl``, to byte ``until``."""
    if path.exists():
        for number, line in enumerate(whole_lines(path, until), 1):
            yield len(line), _decode(_HEAD, line, path, number)


def _decode(decoder: msgspec.json.Decoder[D], line: bytes, path: Path, number: int) -> D:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        fix = "restore the file or move it away"
        raise ConfigError(f"{path}:{number}", f"not a metrics record: {error}", fix) from error

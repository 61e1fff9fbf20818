"""Read the records of a run: all valid records (`iter_metrics`, `read_metrics`) or only new ones (`MetricsTail`).

Find the void records of a metrics file: one pass to note every record, a second pass to filter.

A resumed run repeats steps: its ``resume`` record voids earlier records of later versions of the adapter. Of several
records of one kind and version the last one counts. Memory grows with resumes and repeats, not with records.
"""

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics import records
from areal_lora.run_folder.events import whole_lines
from areal_lora.run_folder.paths import RunFolder


class VoidRecords:
    """First pass: ``note`` every record with its place in the file, in order. Second pass: filter by ``holds``."""

    def __init__(self) -> None:
        # By adapter, (place, version) of the effective resumes, ascending in both: a later resume from an older
        # version voids everything that an earlier one does.
        self._resumes: dict[str, list[tuple[int, int]]] = {}
        self._highest: dict[Key, int] = {}
        self._last: dict[tuple[Key | None, int], int] = {}

    def note(self, place: int, record: records.Record) -> None:
        if isinstance(record, records.ResumeRecord):
            self._resume(place, record)
        elif (key := _key(record)) is not None:
            highest = self._highest.get(key)
            if highest is None or record.version > highest:
                self._highest[key] = record.version  # no earlier record, or only void ones
            else:
                self._last[key, record.version] = place

    @property
    def nothing(self) -> bool:
        return not self._resumes and not self._last

    def holds(self, place: int, record: records.Record) -> bool:
        """Whether the record at ``place`` is valid. A resume always is."""
        if isinstance(record, records.ResumeRecord):
            return True
        resumes = self._resumes.get(record.adapter, [])
        later = bisect_right(resumes, place, key=lambda entry: entry[0])
        if later < len(resumes) and record.version > _last_valid(type(record), resumes[later][1]):
            return False
        return self._last.get((_key(record), record.version), place) <= place

    def _resume(self, place: int, resume: records.ResumeRecord) -> None:
        resumes = self._resumes.setdefault(resume.adapter, [])
        while resumes and resumes[-1][1] >= resume.version:
            resumes.pop()
        resumes.append((place, resume.version))
        for key, highest in self._highest.items():
            if key[1] == resume.adapter:
                self._highest[key] = min(highest, _last_valid(key[0], resume.version))


Key = tuple[type[records.Record], str, str]


def _key(record: records.Record) -> Key | None:
    """What only the last record of a version has; None where a version has several: changes of members, states.

    A version has an evaluation per tag and set.
    """
    if isinstance(record, records.MembersRecord | records.AdapterStateRecord):
        return None
    what = f"{record.tag}/{record.name}" if isinstance(record, records.EvalRecord) else ""
    return type(record), record.adapter, what


def _last_valid(kind: type[records.Record], version: int) -> int:
    """The last version of a ``kind`` that stays valid after a resume from ``version``: a step's is where it starts."""
    return version - 1 if kind is records.StepRecord else version


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
                found.append(_decode(line, self.path, self._lines + 1))
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
    return [_decode(line, path, number) for number, line in enumerate(lines, 1)]


def state_records(run_folder: RunFolder) -> list[records.AdapterStateRecord | records.ResumeRecord]:
    """All states of adapters and the resumes between them, as written.

    Raises ConfigError for a line that is not a record.
    """
    kinds = records.AdapterStateRecord | records.ResumeRecord
    return [record for _, record in _records(run_folder.metrics) if isinstance(record, kinds)]


def recorded_s(run_folder: RunFolder) -> float:
    """The wall time of the last recorded step, void steps included; 0 before the first."""
    steps = (record for _, record in _records(run_folder.metrics) if isinstance(record, records.StepRecord))
    return max((step.time_s for step in steps), default=0.0)


def iter_metrics(run_folder: RunFolder | Path | str, until: int | None = None) -> Iterator[records.Record]:
    """Iterate over all valid records of ``metrics.jsonl`` in the order written, to byte ``until``.

    Records that a resume made void are skipped, which takes two passes over the file; records appended meanwhile are
    returned by the next call. Raises ConfigError with file and line for a line that is not a record.
    """
    folder = RunFolder.of(run_folder)
    path, undone, end = folder.metrics, VoidRecords(), 0
    for number, (nbytes, record) in enumerate(_records(path, until), 1):
        undone.note(number, record)
        end += nbytes
    for number, (_, record) in enumerate(_records(path, end), 1):
        if undone.nothing or undone.holds(number, record):
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


_RECORD: msgspec.json.Decoder[records.Record] = msgspec.json.Decoder(records.Record)


def _records(path: Path, until: int | None = None) -> Iterator[tuple[int, records.Record]]:
    """(bytes of the line, record) of each line of ``metrics.jsonl``, to byte ``until``; none without the file."""
    if path.exists():
        for number, line in enumerate(whole_lines(path, until), 1):
            yield len(line), _decode(line, path, number)


def _decode(line: bytes, path: Path, number: int) -> records.Record:
    try:
        return _RECORD.decode(line)
    except msgspec.DecodeError as error:
        fix = "restore the file or move it away"
        raise ConfigError(f"{path}:{number}", f"not a metrics record: {error}", fix) from error

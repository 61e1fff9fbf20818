"""Record of what the launcher did during a run: one JSON object per line in ``events.jsonl``."""

import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from areal_lora.errors import DISK_ERRORS, ExitCode, RecordError
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder

log = get_logger(__name__)


class JsonlSink:
    """Appends whole lines; each is in the file, readable by others, when ``write`` returns.

    A process killed in the middle of a line leaves a torn tail. It is cut off when the file is
    opened again, so that a resumed run never glues a new record to half an old one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._file = path.open("ab", buffering=0)

    def write(self, line: bytes) -> None:
        """Append one record, or nothing: raises RecordError. ``line`` holds no line break: JSON escapes them."""
        left, start = line + b"\n", os.fstat(self._file.fileno()).st_size
        try:
            while left:
                # A disk that gets full takes a part first.
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):  # the next start cuts what remains
                self._file.truncate(start)
            raise refused(self._file.name, error) from error

    @property
    def nbytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Return when everything written is on the disk: then it also survives a loss of power."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def refused(path: Path | str, error: OSError) -> RecordError:
    """Build the error for a failed write of records. A restart helps where the disk is neither full nor read-only."""
    record = RecordError(
        f"{path}: a record cannot be written: {error.strerror} (fix: make room on the disk, or repair it, then start "
        "the same command: it resumes from the newest checkpoint)"
    )
    if error.errno not in DISK_ERRORS:
        record.exit_code = ExitCode.TEMPORARY
    return record


def whole_lines(path: Path, end: int | None = None, at: int = 0) -> Iterator[bytes]:
    """The whole lines of ``path``, one at a time, from byte ``at`` on; with ``end`` those that start before it."""
    with path.open("rb") as file:
        file.seek(at)
        for line in file:
            if not line.endswith(b"\n") or (end is not None and at >= end):
                return
            at += len(line)
            yield line


def _cut_torn_tail(path: Path) -> None:
    """Cut what follows the last line break, which is searched backwards from the end of the file."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        if not (size := os.fstat(file.fileno()).st_size):  # of the open file: that of its name may be a cached one
            return
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
        if end < size:
            file.truncate(end)


class StartEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="start"):
    """The launcher started; ``resumes``: the run folder held a run to resume."""

    at: str
    resumes: bool


class RestartEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="restart"):
    """The launcher restarts ``process`` (a process, or ``trainer`` for all ranks). ``how`` its last session ended."""

    at: str
    process: str
    how: str


class StallEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stall"):
    """``process`` sent no heartbeat; ``stacks`` is the file with the stacks of all processes."""

    at: str
    process: str
    stacks: str


class AbandonEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="abandoned"):
    """The run continues without ``process``, a server or tracker: its node was lost, or it has no restarts left."""

    at: str
    process: str
    how: str


class RequeueEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="requeue"):
    """Slurm job ``job`` was requeued. ``without``: so often in a row without a new checkpoint."""

    at: str
    job: str
    why: str
    without: int


class EndEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The run ended before its last step, with exit ``code``, because ``process`` (a process, or the run) ended so.

    ``error`` is the last error in its log, with the fix; empty where the log has none.
    """

    at: str
    code: int
    process: str
    how: str
    error: str = ""

    def __str__(self) -> str:
        return f"{self.process} {self.how}" + (f": {self.error}" if self.error else "")


Event = StartEvent | RestartEvent | StallEvent | AbandonEvent | RequeueEvent | EndEvent


def now_utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write_event(run_folder: RunFolder, event: Event) -> None:
    """Append one event; it is in the file when this returns."""
    with closing(JsonlSink(run_folder.events)) as sink:
        sink.write(msgspec.json.encode(event))


def note_event(run_folder: RunFolder, event: Event) -> None:
    """Append ``event``. A disk error is logged: what the launcher does needs no record."""
    try:
        write_event(run_folder, event)
    except (RecordError, OSError) as error:
        log.warning("%s", error)


def read_events(run_folder: RunFolder) -> list[Event]:
    """The events in order, without lines that are none."""
    if not run_folder.events.exists():
        return []
    decoder, found = msgspec.json.Decoder(Event), list[Event]()
    for line in run_folder.events.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):  # after a loss of power, or while a line is written
            found.append(decoder.decode(line))
    return found


def last_end(run_folder: RunFolder) -> EndEvent | None:
    """Why the last start ended before the last step; None while it works, where it is done or left no record."""
    newest = next((e for e in reversed(read_events(run_folder)) if isinstance(e, StartEvent | EndEvent)), None)
    return newest if isinstance(newest, EndEvent) else None


def count_restarts(run_folder: RunFolder) -> dict[str, int]:
    """Restarts by process, over all starts of the launcher; ``trainer`` is all ranks together."""
    counts = Counter(event.process for event in read_events(run_folder) if isinstance(event, RestartEvent))
    return dict(sorted(counts.items()))


def count_requeues(run_folder: RunFolder) -> int:
    """Requeues of the Slurm jobs of the run since its start."""
    return sum(isinstance(event, RequeueEvent) for event in read_events(run_folder))

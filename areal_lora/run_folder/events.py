"""Record of what the launcher did during a run: one JSON object per line in ``events.jsonl``."""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from areal_lora.errors import RecordError
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.jsonl import JsonlSink
from areal_lora.run_folder.paths import RunFolder

log = get_logger(__name__)


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
    """The run continues without ``process``, a server: its node was lost, or it has no restarts left."""

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
    sink = JsonlSink(run_folder.events)
    sink.write(msgspec.json.encode(event))
    sink.close()


def record_end(run_folder: RunFolder, event: EndEvent) -> None:
    """Append ``event``. A full disk is logged: the end of a run needs no record."""
    try:
        write_event(run_folder, event)
    except RecordError as error:
        log.warning("%s", error)


def read_events(run_folder: RunFolder) -> list[Event]:
    if not run_folder.events.exists():
        return []
    decoder = msgspec.json.Decoder(Event)
    return [decoder.decode(line) for line in run_folder.events.read_bytes().splitlines()]


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

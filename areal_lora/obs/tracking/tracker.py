"""What a tracker is: the end that holds the curves of a run, and the boundary to its SDK.

Bring a run to a tracker: all that is recorded, then what is new, until the run has ended.

`MetricsFollower` reads the records that count, each once, when no crash can undo them any more.
"""

import fcntl
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any, Protocol

import msgspec

from areal_lora.config.models import Config
from areal_lora.errors import ArealLoraError, ConfigError, EnvironmentError_
from areal_lora.obs.metrics import records
from areal_lora.obs.metrics.reader import MetricsTail, VoidRecords
from areal_lora.obs.report.page import RunPage, report_page
from areal_lora.obs.report.summary import read_summary
from areal_lora.run_folder.events import StartEvent, read_events
from areal_lora.run_folder.paths import RunFolder

TIMED = (records.StepRecord, records.ResumeRecord, records.MembersRecord, records.AdapterStateRecord)
LEFT_OUT = "(left out)"
FREE_TEXT = ("setup", "extra", "srun_extra", "wrapper")
"""Keys of ``cluster.slurm`` with shell lines and options, in which a key may be exported."""
_SECRET_NAME = re.compile(
    r"(^|[_-])((api)?(key|secret|password|passwd|credential|cookie)s?|token|auth|authorization|bearer)$", re.IGNORECASE
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ASSIGNED = re.compile(r"""((?:--?[\w-]+ +(?!-)|[\w-]+=|\b[Bb]earer +)["']?)([^\s&;"']+)""")
"""A name and its value in an address, a command or a header."""
_CREDENTIALS = re.compile(r'(?<=://)[^/@\s"]+@')  # within one text of the report's JSON
SHORTEST = 8
"""Characters of a variable's value that is taken for a secret."""


def public_config(config: Config) -> dict[str, Any]:
    """``config`` as JSON values. Left out are shell lines of Slurm, what has a name such as ``api_key``, also in an
    address or a command, credentials in addresses, and the values of environment variables with such names."""
    values: dict[str, Any] = config.model_dump(mode="json")
    slurm = values["cluster"]["slurm"]
    for part in (slurm, *slurm["components"]):
        given = flat({name: part[name] for name in FREE_TEXT if name in part})
        part |= {name.partition(".")[0]: LEFT_OUT for name in given}
    masked: dict[str, Any] = _masked(values)
    return masked


def public_json(config: Config) -> str:
    return json.dumps(public_config(config), indent=2, ensure_ascii=False)


def masked_text(text: str) -> str:
    """``text`` without credentials in addresses and values of environment variables with the name of a secret."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and _is_secret(name):
            text = text.replace(value, LEFT_OUT)
    return _CREDENTIALS.sub("", text)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"adapters.0.rank": 8, ...}`` of nested mappings and lists; empty ones have no entry."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(_HUMP.sub("_", name)) is not None


def _masked(value: Any) -> Any:
    match value:
        case str():
            return _ASSIGNED.sub(
                lambda m: m[1] + LEFT_OUT if _is_secret(m[1].strip("-= '\"")) else m[0], masked_text(value)
            )
        case list():
            return [_masked(item) for item in value]
        case dict():
            return {
                masked_text(name): LEFT_OUT if isinstance(item, str | list) and _is_secret(name) else _masked(item)
                for name, item in value.items()
            }
    return value


LONGEST = 300
"""Characters of an error of the SDK."""
_REFUSED = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """A valid record. ``line`` is its line in ``metrics.jsonl``, from 1.

    ``time_s`` is the wall time since the start of the run, of the last record that states one.
    """

    line: int
    time_s: float
    record: records.Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the run ended. ``state`` is ``done`` or ``stopped``; ``summary`` is empty for a run without figures."""

    state: str
    summary: Mapping[str, Any]
    report: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker's run is made from. ``key`` is the same for every process that tracks the run.

    ``name`` is what the tracker shows, ``config`` has no secrets (`tracker`). ``started_at`` is the time of the
    first start, UTC as in ``events.jsonl``; empty if it is not recorded.
    """

    folder: RunFolder
    key: str
    name: str
    config: Mapping[str, Any]
    started_at: str


class Tracker(Protocol):
    """One run of a tracker. Every method raises EnvironmentError_ in one line where the tracker refuses or is lost."""

    @property
    def where(self) -> str:
        """Where it can be looked at."""

    def held(self) -> int:
        """The last line of ``metrics.jsonl`` that it holds; 0 for none."""

    def send(self, rows: Sequence[MetricsRow]) -> None:
        """Add ``rows``, in the order of their lines."""

    def end(self, ending: Ending | None) -> None:
        """Send what remains. None: the run continues, and this process ends."""


def tracked_run(folder: RunFolder, name: str | None, config: Mapping[str, Any]) -> TrackedRun:
    """Its key is made from the run's name and first start, so it survives a move and differs after ``--fresh``.

    Another ``name`` is another run of the tracker.
    """
    shown = name or folder.name
    started_at = next((event.at for event in read_events(folder) if isinstance(event, StartEvent)), "")
    digest = hashlib.sha256("\n".join((folder.name, started_at, shown)).encode()).hexdigest()
    key = f"{_REFUSED.sub('-', folder.name[:80])}-{digest[:10]}"
    return TrackedRun(folder=folder, key=key, name=shown, config=config, started_at=started_at)


@contextmanager
def speaking_to(tracker: str) -> Iterator[None]:
    """Raise EnvironmentError_ in one line, without keys, for whatever the SDK raises."""
    try:
        yield
    except ArealLoraError:
        raise
    except Exception as error:  # fault boundary: errors of the SDK, its transport, its server  # noqa: BLE001
        reason = masked_text(" ".join(str(error).split()))[:LONGEST] or type(error).__name__
        fix = "check key, name and connection; the same command continues where it stopped, the run is not affected"
        raise EnvironmentError_(f"{tracker}: {reason} (fix: {fix})") from None


def require(module: str, package: str, extra: str) -> None:
    """Raise EnvironmentError_ where ``module`` is not installed; a folder of that name in the working folder is not."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise EnvironmentError_(
            f"this environment has no package {package} (fix: pip install 'areal-lora[{extra}]', or {package} itself)"
        )


POLL_S = 1.0
ROWS = 200
"""Rows that a tracker gets at a time."""
HOLD_S = 120.0
"""The longest wait of a step for the checkpoint that contains it, beside the time of the steps before that one."""


class _UnsavedSteps:
    """The steps of each adapter that no checkpoint contains yet, oldest first: (line, record, time of reading).

    The wait ends at a record that is younger than the step by ``HOLD_S`` and ``behind`` steps, as long as the slowest
    that waits: a run that starts again reports first what is undone.
    """

    def __init__(self, behind: int) -> None:
        self._steps: dict[str, deque[tuple[int, records.StepRecord, float]]] = {}
        self._behind, self._newest_s = behind, 0.0

    def see(self, line: int, record: records.Record, now_s: float) -> None:
        self._newest_s = now_s
        unsaved = self._steps.setdefault(record.adapter, deque())
        match record:
            case records.StepRecord():
                unsaved.append((line, record, now_s))
            case records.CheckpointRecord(version=version, failed=False):
                while unsaved and unsaved[0][1].step < version:
                    unsaved.popleft()
            case records.ResumeRecord():
                unsaved.clear()  # each step before it is in its checkpoint, or void

    def first(self) -> int | None:
        """The line of the first step that is still to wait; None if none is."""
        for unsaved in self._steps.values():
            hold_s = HOLD_S + self._behind * max((step.step_s for _, step, _ in unsaved), default=0.0)
            while unsaved and self._newest_s - unsaved[0][2] >= hold_s:
                unsaved.popleft()
        return min((unsaved[0][0] for unsaved in self._steps.values() if unsaved), default=None)


class MetricsFollower:
    """Reads the file twice: far ahead to find out what counts, then up to the first step that may still be undone.

    A run that crashes resumes from its newest checkpoint and repeats the steps after it. So a step, and all lines after
    it, wait for a checkpoint that contains it, which comes ``behind`` steps later at most. Lines up to ``sent`` are
    skipped. Memory is bounded. The rows of ``only`` name no adapter, as its tags in TensorBoard (`MetricsWriter`).
    """

    def __init__(
        self,
        run_folder: RunFolder,
        sent: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        behind: int = 0,
        only: str | None = None,
    ) -> None:
        self._ahead, self._behind = MetricsTail(run_folder), MetricsTail(run_folder)
        self._sent, self._clock, self._only = sent, clock, only
        self._undone, self._held = VoidRecords(), _UnsavedSteps(behind)
        self._known = self._line = 0
        self._waiting: deque[records.Record] = deque()
        self._time_s = 0.0

    def read_new(self, *, everything: bool = False) -> Iterator[MetricsRow]:
        """The rows since the last call. ``everything``: the run is over, nothing waits any more.

        Raises ConfigError with file and line for a line that is not a record.
        """
        now_s = self._clock()
        while new := self._ahead.read_new():
            for record in new:
                self._known += 1
                self._undone.note(self._known, record)
                self._held.see(self._known, record, now_s)
        first = None if everything else self._held.first()
        end = self._known if first is None else first - 1
        while self._line < end:
            if not self._waiting:
                self._waiting.extend(self._behind.read_new())
            record = self._waiting.popleft()
            self._line += 1
            if isinstance(record, TIMED):
                self._time_s = max(self._time_s, record.time_s)
            if self._line > self._sent and self._undone.holds(self._line, record):
                shown = msgspec.structs.replace(record, adapter="") if record.adapter == self._only else record
                yield MetricsRow(line=self._line, time_s=self._time_s, record=shown)


def follow(
    folder: RunFolder,
    tracker: Tracker,
    ended: Callable[[], str | None],
    *,
    behind: int = 0,
    only: str | None = None,
    wait: bool = True,
    every_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Send what ``tracker`` does not hold; ``behind`` and ``only`` are as in `MetricsFollower`.

    ``ended`` returns how the run has ended, None: it has not. It is called every ``every_s`` seconds at most; its
    result is returned at the end. Steps without a checkpoint are sent once the run is done. Without ``wait`` it sends
    what is there once. The tracker learns of an interrupt.
    """
    follower, due = MetricsFollower(folder, tracker.held(), behind=behind, only=only), 0.0
    try:
        while True:
            state = None
            if (now := time.monotonic()) >= due:
                state, due = ended(), now + every_s  # before reading: nothing is written after the end
            rows = follower.read_new(everything=state == "done")  # a resume repeats steps without a checkpoint
            while some := list(islice(rows, ROWS)):
                tracker.send(some)
            if state is not None or not wait:
                break
            sleep(POLL_S)
    except KeyboardInterrupt:
        tracker.end(None)
        raise
    if state is None:
        tracker.end(None)
        return None
    summary: dict[str, Any] = read_summary(folder).values() if folder.summary.is_file() else {}
    report = masked_text(report_page(RunPage(folder, public_json)))  # its texts of faults may quote an address
    tracker.end(Ending(state=state, summary=summary, report=report))
    return state


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

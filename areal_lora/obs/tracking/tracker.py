"""What a tracker is: the end that holds the curves of a run, and the boundary to its SDK."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from areal_lora.errors import ArealLoraError, EnvironmentError_
from areal_lora.obs.metrics.records import Record
from areal_lora.obs.tracking.public_config import masked_text
from areal_lora.run_folder.events import StartEvent, read_events
from areal_lora.run_folder.paths import RunFolder

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
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the run ended. ``state`` is ``done`` or ``stopped``; ``summary`` is empty for a run without figures."""

    state: str
    summary: Mapping[str, Any]
    report: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker's run is made from. ``key`` is the same for every process that tracks the run.

    ``name`` is what the tracker shows, ``config`` has no secrets (`public_config`). ``started_at`` is the time of the
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

"""What the launcher knows about a process, or a run, that is over."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from areal_lora.errors import ExitCode
from areal_lora.launcher.plan import ProcessSpec

LOG_LINES, ERROR_CHARACTERS = 10_000, 1000
_STARTS = re.compile(r"---- \S+ starts again, ")
_RECORD = re.compile(r"[\d:.]+ \S+ (?:ERROR|CRITICAL) \S+: (.*)")
_RAISED = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Exit)_?: .*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """A process that is over. ``code`` is negative for a signal, as in ``subprocess``.

    ``why`` states the reason if the launcher itself, or a failed peer, ended it; ``error`` is the last one in its log.
    ``pid`` is 0 and ``node`` its host in a Slurm job. ``lost``: with that node. ``never_started``: it could not be
    started on it.
    """

    spec: ProcessSpec
    code: int
    log: Path
    pid: int = 0
    why: str = ""
    node: str = ""
    lost: bool = False
    never_started: bool = False
    error: str = ""

    @property
    def cause(self) -> str:
        """How it ended, and the error where it is known."""
        return f"{self.how()}: {self.error}" if self.error else self.how()

    def how(self) -> str:
        if self.lost:
            return f"was lost with node {self.node}"
        if self.never_started:
            return f"could not be started on {self.node}"
        if self.why:
            return self.why
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}"


def with_error(ended: ProcessExit) -> ProcessExit:
    """``ended`` with the last error of its log, if it exited by itself: an earlier one is not why a signal ended it.

    An exception that no record reports counts as one. Reads the last 64 KiB.
    """
    if ended.code <= 0 or ended.why or ended.never_started:
        return ended
    found = ""
    for line in last_lines(ended.log, LOG_LINES):
        if _STARTS.match(line):
            found = ""
        elif (error := _RECORD.match(line) or _RAISED.match(line)) is not None:
            found = error[1]
    return replace(ended, error=found[:ERROR_CHARACTERS])


def last_lines(path: Path, n: int) -> list[str]:
    """The last ``n`` lines of a log; reads at most its last 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            return file.read().decode("utf-8", "replace").splitlines()[-n:]
    except FileNotFoundError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. ``why`` names the process that failed and how, for another code than DONE."""

    code: ExitCode
    why: str = ""

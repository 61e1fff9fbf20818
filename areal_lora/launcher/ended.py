"""What the launcher knows about a process, or a run, that is over."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from areal_lora.errors import ExitCode
from areal_lora.launcher.plan import ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that is over. ``code`` is negative for a signal, as in ``subprocess``.

    ``why`` states the reason if the launcher itself, or a failed peer, ended it. ``pid`` is 0 and ``node``
    its host in a Slurm job. ``lost``: with that node. ``never_began``: it could not be started on it.
    """

    spec: ProcessSpec
    code: int
    log: Path
    pid: int = 0
    why: str = ""
    node: str = ""
    lost: bool = False
    never_began: bool = False

    def how(self) -> str:
        if self.lost:
            return f"was lost with node {self.node}"
        if self.never_began:
            return f"could not be started on {self.node}"
        if self.why:
            return self.why
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. ``why`` names the process that failed and how, for another code than DONE."""

    code: ExitCode
    why: str = ""

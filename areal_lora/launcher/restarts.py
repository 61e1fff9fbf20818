"""Decide which processes the launcher restarts, and when. Pure: time and facts are passed in.

A unit is what starts together: a server, the controller, all ranks of the trainer (one rank alone cannot rejoin its
peers' collectives). Each unit has a budget of restarts with exponential back-off. A session that made progress for
``HEALTHY_S`` restores the whole budget of its unit.

A service that has worked is restarted for as long as the run trains: it has no budget, and no exit code of it ends the
run.

A lost node costs no budget: a server on it is abandoned while enough others remain, anything else ends the session. A
unit that could not be started on its node is tried again until the node is known to be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from areal_lora.errors import NON_RETRYABLE, ExitCode
from areal_lora.launcher.ended import ProcessExit
from areal_lora.launcher.plan import SERVER, SERVICE, TRAINER, ProcessSpec

BACK_OFF_S, LONGER = 1.0, 4.0
SERVICE_STEPS = 3
"""Times that the delay of a service grows."""
HEALTHY_S = 600.0
LAUNCH_AGAIN_S, LAUNCHES, FIRST_LAUNCHES = 10.0, 60, 3
"""Delay after a start that the node did not take, and the most such starts in a row; of a unit that never worked."""


def unit_of(spec: ProcessSpec) -> str:
    """``server-1``, ``controller-0``, or ``trainer`` for every rank."""
    return TRAINER if spec.role == TRAINER else spec.name


def to_blame(ended: Sequence[ProcessExit]) -> ProcessExit | None:
    """The process to blame among those of a unit that ended together; None where all ended well.

    A process killed by a signal comes first, then one with a non-retryable exit code: their peers lose connections.
    """
    failed = [e for e in ended if e.code != ExitCode.DONE]
    return min(failed, key=lambda e: (e.code >= 0, e.code not in NON_RETRYABLE), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartVerdict:
    """Decision about a failed unit. ``ends_run``: the run cannot continue without it."""

    ended: ProcessExit
    ends_run: bool
    wait_s: float | None = None
    times: int = 0
    most: int = 0

    @property
    def abandoned(self) -> bool:
        """Whether the run continues without the unit."""
        return not self.ends_run and self.wait_s is None

    def __str__(self) -> str:
        name, how = self.ended.spec.name, self.ended.cause
        subject = "all trainer ranks are" if self.ended.spec.role == TRAINER else "it is"
        if self.ends_run:
            return f"{name} {how}"
        if self.abandoned:
            return f"{name} {how}; it is not restarted, the other servers continue"
        count = f" ({self.times} of {self.most})" if self.times else ""
        return f"{name} {how}; {subject} restarted in {self.wait_s:g} s{count}"


@dataclass(slots=True)
class _Unit:
    specs: tuple[ProcessSpec, ...]
    most: int
    times: int = 0
    has_worked: bool = False
    due: float | None = None
    over: bool = False
    launches: int = 0


@dataclass(slots=True)
class Restarts:
    """``most`` is the number of restarts by role, ``min_servers`` what the run needs; see the module's text."""

    specs: Sequence[ProcessSpec]
    most: Mapping[str, int]
    min_servers: int = 1
    _units: dict[str, _Unit] = field(init=False)

    def __post_init__(self) -> None:
        self._units = {}
        for spec in self.specs:
            unit = self._units.setdefault(unit_of(spec), _Unit((), self.most.get(spec.role, 0)))
            unit.specs += (spec,)

    def members(self, spec: ProcessSpec) -> tuple[ProcessSpec, ...]:
        """All processes that start together with ``spec``."""
        return self._units[unit_of(spec)].specs

    def take(self, ended: ProcessExit, now: float, worked_s: float | None) -> RestartVerdict:
        """Decide about the unit of ``ended`` (the process to blame). ``due`` gives it out when its time has come.

        Args:
            worked_s: Seconds from the first heartbeat of the ended session to its last; None before the first.
        """
        unit = self._units[unit_of(ended.spec)]
        unit.has_worked |= worked_s is not None
        if ended.lost:
            return self._abandon(unit, ended)
        if ended.never_started:
            return self._launch_again(unit, ended, now)
        unit.launches = 0
        if (worked_s or 0.0) >= HEALTHY_S:
            unit.times = 0
        if ended.spec.role == SERVICE and unit.has_worked:
            unit.times += 1
            unit.due = now + BACK_OFF_S * LONGER ** min(unit.times - 1, SERVICE_STEPS)
            return RestartVerdict(ended=ended, ends_run=False, wait_s=unit.due - now)
        if ended.code in NON_RETRYABLE or not (unit.has_worked or ended.code < 0):
            # A process that failed before its first heartbeat is likely to fail again.
            return RestartVerdict(ended=ended, ends_run=True)
        temporary = ended.spec.role == SERVER and ended.code == ExitCode.TEMPORARY
        if not temporary and unit.times >= unit.most:
            return self._abandon(unit, ended)
        unit.times += not temporary
        wait_s = BACK_OFF_S * LONGER ** max(0, unit.times - 1)
        unit.due = now + wait_s
        times = 0 if temporary else unit.times
        return RestartVerdict(ended=ended, ends_run=False, wait_s=wait_s, times=times, most=unit.most)

    def due(self, now: float) -> list[tuple[ProcessSpec, ...]]:
        """Units to restart now; each is returned once."""
        ready = []
        for unit in self._units.values():
            if unit.due is not None and now >= unit.due:
                unit.due = None
                ready.append(unit.specs)
        return ready

    def _abandon(self, unit: _Unit, ended: ProcessExit) -> RestartVerdict:
        unit.over = True
        servers = [u for u in self._units.values() if u.specs[0].role == SERVER]
        enough = sum(not u.over for u in servers) >= min(self.min_servers, len(servers))
        return RestartVerdict(ended=ended, ends_run=ended.spec.role != SERVER or not enough)

    def _launch_again(self, unit: _Unit, ended: ProcessExit, now: float) -> RestartVerdict:
        unit.launches += 1
        if unit.launches >= (LAUNCHES if unit.has_worked else FIRST_LAUNCHES):
            return self._abandon(unit, replace(ended, lost=unit.has_worked))
        unit.due = now + LAUNCH_AGAIN_S
        return RestartVerdict(ended=ended, ends_run=False, wait_s=LAUNCH_AGAIN_S)

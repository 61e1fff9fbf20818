"""Decide which processes the launcher restarts, and when. Pure: time and facts are passed in.

A unit is what starts together: a server, the controller, all ranks of the trainer (one rank alone cannot rejoin its
peers' collectives). Each unit has a budget of restarts with exponential back-off. A session that made progress for
``HEALTHY_S`` restores the whole budget of its unit; one of the trainer only with a new checkpoint, without which the
next session repeats its steps.

A service, or gateway for remote servers, that has worked is restarted while the run trains: no budget or code ends it.

A tracker or page is abandoned when its budget is spent, whatever its exit codes: the run does not depend on it.

A lost node costs no budget: a server on it is abandoned while enough others remain, anything else ends the session. A
unit that could not be started on its node is tried again until the node is known to be lost.
"""

import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from areal_lora.errors import NON_RETRYABLE, ExitCode
from areal_lora.launcher.plan import OBSERVERS, PAGE, REMOTE, SERVER, SERVICE, TRACKER, TRAINER, ProcessSpec
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import EVERY_S, read_statuses, revalidated_beats

LOG_LINES, ERROR_CHARACTERS = 10_000, 1000
_LEAKS = re.compile(r"nanobind: | - leaked | - \.\.\. skipped remainder|See https://nanobind\.")
"""What Triton's bindings print at the end of a process that has imported them."""
_STARTS = re.compile(r"---- \S+ starts again, ")
_RECORD = re.compile(r"[\d:.]+ \S+ (?:ERROR|CRITICAL) \S+: (.*)")
_RAISED = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Exit)_?: .*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """A process that is over. ``code`` is negative for a signal. ``error`` is the last one in its log.

    ``why`` states the reason if the launcher itself, or a failed peer, ended it. In a Slurm job ``pid`` is 0, ``node``
    its host. ``lost``: with that node. ``never_started`` on it. ``planned``: a server left in its turn to restart.
    """

    spec: ProcessSpec
    code: int
    log: Path
    pid: int = 0
    why: str = ""
    node: str = ""
    lost: bool = False
    never_started: bool = False
    planned: bool = False
    error: str = ""

    @property
    def cause(self) -> str:
        """How it ended, and the error where it is known."""
        return self.how() + (f": {self.error}" if self.error else "")

    def how(self) -> str:
        if self.lost:
            return f"was lost with node {self.node}"
        if self.never_started:
            return f"could not be started on {self.node}"
        if self.planned:
            return "left to restart"
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


def left_in_turn(run_folder: RunFolder, ended: ProcessExit) -> ProcessExit:
    """``ended``, marked if it was to leave and did so; it is to leave no more."""
    leave = run_folder.leaves / ended.spec.name
    planned = ended.code == ExitCode.DONE and not ended.lost and leave.exists()
    leave.unlink(missing_ok=True)
    return replace(ended, planned=planned)


def note_restart(log: Path, process: str) -> None:
    """Separate the sessions of ``process`` in its log; an empty log stays so."""
    with log.open("ab") as file:
        if file.tell():
            file.write(f"---- {process} starts again, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC ----\n".encode())


def last_lines(path: Path, n: int) -> list[str]:
    """The last ``n`` lines of a log, without `_LEAKS`; reads at most its last 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            lines = file.read().decode("utf-8", "replace").splitlines()
            return [line for line in lines if not _LEAKS.match(line)][-n:]
    except FileNotFoundError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. ``why`` names the process that failed and how, for another code than DONE."""

    code: ExitCode
    why: str = ""


BACK_OFF_S, LONGER = 1.0, 4.0
GROWTHS = 3
"""Times that the delay of a service, tracker or page grows."""
OBSERVER_RESTARTS = 8
FIXES = {TRACKER: "areal-lora track RUN sends what is missing", PAGE: "areal-lora page RUN"}
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
            fix = FIXES.get(self.ended.spec.role)
            rest = f"the run continues without it (fix: {fix})" if fix else "the other servers continue"
            return f"{name} {how}; it is not restarted, {rest}"
        count = f" ({self.times} of {self.most})" if self.times else ""
        return f"{name} {how}; {subject} restarted in {self.wait_s:g} s{count}"


@dataclass(slots=True)
class _Unit:
    specs: tuple[ProcessSpec, ...]
    most: int
    times: int = 0
    has_worked: bool = False
    failed_first: bool = False  # before its first heartbeat
    due: float | None = None
    over: bool = False
    launches: int = 0
    restarted_at: float = 0.0
    newest: Mapping[str, int] = field(default_factory=dict)  # at the end of the last session


class Restarts:
    """``most`` is the number of restarts by role, ``min_servers`` what the run needs; see the module's text.

    With ``nodes_return`` a lost node gets its units back when it is there again: the loss is a failure like others.
    """

    def __init__(
        self, specs: Sequence[ProcessSpec], most: Mapping[str, int], min_servers: int = 1, nodes_return: bool = False
    ) -> None:
        self._units, self.min_servers, self._nodes_return = dict[str, _Unit](), min_servers, nodes_return
        for spec in specs:
            unit = self._units.setdefault(unit_of(spec), _Unit((), most.get(spec.role, 0)))
            unit.specs += (spec,)

    def members(self, spec: ProcessSpec) -> tuple[ProcessSpec, ...]:
        """All processes that start together with ``spec``."""
        return self._units[unit_of(spec)].specs

    def take(
        self, ended: ProcessExit, now: float, worked_s: float | None, newest: Mapping[str, int] | None = None
    ) -> RestartVerdict:
        """Decide about the unit of ``ended`` (the process to blame). ``due`` gives it out when its time has come.

        Args:
            worked_s: Seconds from the first heartbeat of the ended session to its last; None before the first.
            newest: Versions of the newest checkpoints by adapter; None where work counts without one.
        """
        unit, observes = self._units[unit_of(ended.spec)], ended.spec.role in OBSERVERS
        advanced = newest is None or any(v > unit.newest.get(name, -1) for name, v in newest.items())
        unit.newest = newest or {}
        worked_s = now - unit.restarted_at if observes else worked_s
        unit.has_worked |= worked_s is not None
        if ended.lost and not self._nodes_return:
            return self._abandon(unit, ended)
        if ended.never_started:
            unit.launches += 1
            if unit.launches >= (LAUNCHES if unit.has_worked else FIRST_LAUNCHES):
                return self._abandon(unit, replace(ended, lost=unit.has_worked))
            return self._again(unit, ended, now, LAUNCH_AGAIN_S)
        unit.launches = 0
        if ended.planned:
            return self._again(unit, ended, now, 0.0)
        if (worked_s or 0.0) >= HEALTHY_S and advanced:
            unit.times = 0
        if ended.spec.role in (SERVICE, REMOTE) and unit.has_worked:
            unit.times += 1
            return self._again(unit, ended, now, BACK_OFF_S * LONGER ** min(unit.times - 1, GROWTHS))
        first = not (unit.has_worked or ended.code < 0)
        unit.failed_first = first or (unit.failed_first and not unit.has_worked)
        if not observes and (ended.code in NON_RETRYABLE or (first and self._fails_again(ended.spec.role))):
            return RestartVerdict(ended=ended, ends_run=True)
        temporary = ended.spec.role == SERVER and ended.code == ExitCode.TEMPORARY and unit.has_worked
        if not temporary and unit.times >= unit.most:
            return self._abandon(unit, ended)
        unit.times += not temporary
        growths = max(0, unit.times - 1)
        wait_s = BACK_OFF_S * LONGER ** (min(growths, GROWTHS) if observes else growths)
        return self._again(unit, ended, now, wait_s, 0 if temporary else unit.times)

    def _fails_again(self, role: str) -> bool:
        """Whether what fails before its first heartbeat will again: where few servers do, it is due to their nodes."""
        servers = [unit for unit in self._units.values() if unit.specs[0].role == SERVER]
        return role != SERVER or 2 * sum(unit.failed_first for unit in servers) >= len(servers)

    def _again(self, unit: _Unit, ended: ProcessExit, now: float, wait_s: float, times: int = 0) -> RestartVerdict:
        unit.due = now + wait_s
        return RestartVerdict(ended=ended, ends_run=False, wait_s=wait_s, times=times, most=unit.most)

    def due(self, now: float) -> list[tuple[ProcessSpec, ...]]:
        """Units to restart now; each is returned once."""
        ready = [unit for unit in self._units.values() if unit.due is not None and now >= unit.due]
        for unit in ready:
            unit.due, unit.restarted_at = None, now
        return [unit.specs for unit in ready]

    def _abandon(self, unit: _Unit, ended: ProcessExit) -> RestartVerdict:
        unit.over, role = True, ended.spec.role
        servers = [u for u in self._units.values() if u.specs[0].role == SERVER]
        enough = sum(not u.over for u in servers) >= min(self.min_servers, len(servers))
        return RestartVerdict(ended=ended, ends_run=role not in OBSERVERS and (role != SERVER or not enough))


WRITE_S = 3.0
"""For processes to write their stacks; one that is stopped never does."""


def write_stall(run_folder: RunFolder, request: Callable[[], None], stuck: str) -> Path:
    """Gather in ``stacks/stall-N.txt`` the stacks that ``request`` has processes write; returns that file."""
    folder = run_folder.stacks
    folder.mkdir(exist_ok=True)
    before = {path: path.stat().st_size for path in folder.glob("*.txt")}
    request()
    time.sleep(WRITE_S)
    parts = [f"{stuck}; {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"]
    statuses = read_statuses(run_folder)
    for name in sorted(statuses.keys() | {path.stem for path in before}):
        path = run_folder.stack_dump(name)
        text = path.read_bytes()[before.get(path, 0) :].decode("utf-8", "replace") if path.exists() else ""
        if text or name in statuses:
            parts.append(f"==== {name}: {statuses.get(name, '')}\n{text or '(no answer)'}")
    target = next(path for n in count(1) if not (path := folder / f"stall-{n}.txt").exists())
    target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return target


LONGEST_LOOK_S = 5.0
"""Limit of the silence counted between two looks: a longer gap means that the launcher or the machine was stopped."""


@dataclass(slots=True)
class _Session:
    beat: int
    first: float
    last: float
    excused: float = 0.0


@dataclass(slots=True)
class Pulse:
    """Silence of each process, between the launcher's own looks. ``limits``: seconds that a role may take.

    Time in which the launcher did not look is no silence: after a suspend all processes have been silent for as long.
    """

    limits: Mapping[str, float]
    _sessions: dict[str, _Session] = field(default_factory=dict)
    _looked: float | None = None

    def due(self, now: float) -> bool:
        """Whether the next look is due: processes beat once in ``EVERY_S``."""
        return self._looked is None or now >= self._looked + EVERY_S

    def look(self, beats: Mapping[str, int], now: float) -> None:
        """Take in what ``status.last_beats`` returned at ``now``."""
        unseen = max(0.0, now - self._looked - LONGEST_LOOK_S) if self._looked is not None else 0.0
        self._looked = now
        for known in self._sessions.values():
            known.excused += unseen
        for name, beat in beats.items():
            if name not in self._sessions:
                self._sessions[name] = _Session(beat, now, now)
            elif (session := self._sessions[name]).beat != beat:
                session.beat, session.last, session.excused = beat, now, 0.0

    def silent(self, now: float) -> dict[str, float]:
        """Seconds of silence by process, for those that have beaten and then not beaten for longer than their limit."""
        silences = {name: now - session.last - session.excused for name, session in self._sessions.items()}
        return {name: s for name, s in silences.items() if s > self.limits[name.rpartition("-")[0]]}

    def worked_s(self, name: str) -> float | None:
        """Seconds from the first heartbeat of ``name`` to its last; None before the first."""
        session = self._sessions.get(name)
        return None if session is None else session.last - session.first

    def forget(self, name: str) -> None:
        """End the session of ``name``; its next beat starts the next one."""
        self._sessions.pop(name, None)


def silences(pulse: Pulse, run_folder: RunFolder, running: Collection[ProcessSpec], now: float) -> dict[str, float]:
    """Seconds of silence of those of ``running`` that are stuck.

    Before one counts as such, its heartbeat file is read again by ``revalidated_beats``: mounts with
    attribute caches of a minute would show every process as silent.
    """
    suspects = pulse.silent(now).keys() & {spec.name for spec in running}
    if suspects:
        pulse.look(revalidated_beats(run_folder, suspects), now)
    return {name: s for name, s in pulse.silent(now).items() if name in suspects}

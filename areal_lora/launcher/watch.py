"""Watch the processes of a run: restart what failed, end what is stuck, decide when the run is over.

One implementation for processes of this machine and for the steps of a Slurm job.

``areal-lora restart-servers`` restarts the rollout servers in turn while the others serve::

    command --- request ---> launcher of the run: `Turns.step` --- leave ---> server: leaves in order, ends well
       `------ progress <--------'      `- published again, joined: the next one     `- restarted by its own launcher

The files are of the session: a run that starts again has new servers. The launcher that added a server restarts it.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
from rich.console import Console

from areal_lora.checkpoint.checkpoint_store import newest_in
from areal_lora.config.models import Config
from areal_lora.errors import ArealLoraError, ConfigError, ExitCode
from areal_lora.launcher import plan as roles, restarts
from areal_lora.launcher.plan import SERVER
from areal_lora.launcher.restarts import ProcessExit, Pulse, Restarts, RestartVerdict
from areal_lora.launcher.sweep import Halving
from areal_lora.obs.console import LiveConsole, print_line
from areal_lora.run_folder.events import AbandonEvent, EndEvent, RestartEvent, StallEvent, note_event, now_utc
from areal_lora.run_folder.paths import RunFolder, read_record, write_file
from areal_lora.run_folder.rendezvous import forget_endpoint, published_files, read_endpoint
from areal_lora.run_folder.status import HEARTBEAT_TIMEOUT_S, LoadingServers, forget_beats, last_beats, read_statuses

LOG_LINES = 30
POLL_S, TICK_S = 0.1, 0.5
PEER_GRACE_S = 1.5
"""Time that the other trainer ranks get to log what they saw after one rank ended; then they are killed."""
EARLY_END_S = 30.0
"""A process may end well so long before trainer rank 0 does; longer is a failure."""


TRACKERS_S = 30.0
"""Time that trackers get after a run is done."""


class Processes(Protocol):
    """The processes of a run, wherever they are."""

    def start(self, specs: Sequence[roles.ProcessSpec]) -> None:
        """Start ``specs`` in order. Raises EnvironmentError_ where that is impossible."""

    def poll(self) -> list[ProcessExit]:
        """Processes that ended since the last call, in starting order; what they left is killed. Called often."""

    def end(self, specs: Collection[roles.ProcessSpec], grace_s: float = 0.0, why: str = "") -> list[ProcessExit]:
        """Wait up to ``grace_s`` for ``specs``, then kill them and what they started; those that ran get ``why``."""

    def running(self) -> list[roles.ProcessSpec]: ...

    def ask_stacks(self) -> None:
        """Request the stacks of every process (``processes.stacks``)."""


class Watch:
    """Sees to the processes until trainer rank 0 ends well, one fails for good, or a signal comes."""

    def __init__(
        self, config: Config, plan: roles.JobPlan, processes: Processes, view: LiveConsole, poll_s: float = POLL_S
    ) -> None:
        self._folder, self._processes, self._view, self._poll_s = plan.run_folder, processes, view, poll_s
        budget, beats_s = config.run.max_restarts, HEARTBEAT_TIMEOUT_S
        budgets = dict.fromkeys((roles.TRAINER, roles.CONTROLLER, roles.SERVER), budget)
        budgets |= dict.fromkeys(roles.OBSERVERS, restarts.OBSERVER_RESTARTS)
        returns, least = config.cluster.kind == "nodes", config.cluster.min_servers
        self._restarts = Restarts(plan.processes, budgets, min_servers=least, nodes_return=returns)
        beating = dict.fromkeys((roles.CONTROLLER, roles.SERVER, roles.SERVICE, roles.REMOTE), beats_s)
        self._pulse = Pulse(beating | {roles.TRAINER: config.run.stall_s})
        self._early: list[tuple[float, ProcessExit]] = []
        self._next_tick = 0.0
        self._halving = Halving(plan.run_folder, view)
        self._rolling = RollingRestart(config, plan.run_folder, view)
        self._page, self._in_job = "", config.cluster.kind != "local"
        self._serves = config.service is not None

    def until_end(self, asked_to_stop: Callable[[], bool]) -> ProcessExit | None:
        """The failure that ends the run, or None: done, or stopped on request."""
        while not asked_to_stop():
            ended, now = self._processes.poll(), time.monotonic()
            if ended or self._pulse.due(now):
                self._pulse.look(last_beats(self._folder), now)
            if any(e.spec.role == roles.TRAINER and e.spec.index == 0 and e.code == ExitCode.DONE for e in ended):
                self._wait_for_trackers(asked_to_stop)
                return None
            # The other ranks and the controller may end well shortly before rank 0 does.
            early = [e for e in ended if e.code == ExitCode.DONE and e.spec.role != roles.SERVER]
            self._early += [(now, e) for e in early]
            too_early = [e for at, e in self._early if now - at > EARLY_END_S]
            self._early = [(at, e) for at, e in self._early if e not in too_early]
            ended = [e for e in ended if e not in early]
            failure = self._settle(ended + too_early, now) or self._end_stalled(now)
            if failure is not None:
                return failure
            for specs in self._restarts.due(time.monotonic()):
                for spec in (spec for spec in specs if spec.role != SERVER):
                    # Others wait for the new ports. The trainer needs those of a server to check whether it is alive.
                    with contextlib.suppress(OSError):
                        forget_endpoint(self._folder, spec.role, spec.index)
                self._processes.start(specs)
            if now >= self._next_tick:
                self._view.tick()
                self._halving.look()
                self._rolling.look(now)
                self._show_page()
                self._next_tick = now + TICK_S
            time.sleep(self._poll_s)
        return None

    def _show_page(self) -> None:
        """Print the address of the run's page once, also of one that was restarted; a job's log may be read by all."""
        with contextlib.suppress(OSError):
            if (address := self._folder.page.read_text(encoding="ascii").strip()) != self._page:
                self._page = address
                where = f"{self._folder.page} has its address" if self._in_job else address
                self._view.note(f"page: {where}")

    def _wait_for_trackers(self, asked_to_stop: Callable[[], bool]) -> None:
        """Let the trackers of a run that is done send the rest; a stop kills those that need longer."""
        deadline = time.monotonic() + TRACKERS_S
        while any(spec.role == roles.TRACKER for spec in self._processes.running()) and time.monotonic() < deadline:
            if asked_to_stop():
                return
            self._processes.poll()
            time.sleep(self._poll_s)

    def _settle(self, ended: list[ProcessExit], now: float) -> ProcessExit | None:
        """Decide about each unit of which something ended. Returns the failure that ends the run."""
        units: dict[str, list[ProcessExit]] = defaultdict(list)
        for e in ended:
            units[restarts.unit_of(e.spec)].append(e)
        for members in units.values():
            members += self._processes.end(self._restarts.members(members[0].spec), PEER_GRACE_S, "was ended")
            blamed = restarts.to_blame([e for e in members if not e.why]) or members[0]
            verdict = self._decide(blamed, now)
            if verdict.ends_run:
                return verdict.ended
        return None

    def _end_stalled(self, now: float) -> ProcessExit | None:
        """Record and end processes without a heartbeat for too long. Returns the failure that ends the run."""
        running = self._processes.running()
        silent = restarts.silences(self._pulse, self._folder, running, now)
        stuck = [(spec, f"sent no heartbeat for {silent[spec.name]:.0f} s") for spec in running if spec.name in silent]
        if not stuck:
            return None
        which = "; ".join(f"{spec.name} {how}" for spec, how in stuck)
        try:
            stacks = str(restarts.write_stall(self._folder, self._processes.ask_stacks, which))
        except OSError as error:
            stacks = f"no file: {error}"
        waits = "; ".join(f"{process}: {text}" for process, text in read_statuses(self._folder).items())
        self._view.note(f"{which}; the stacks of all processes are in {stacks}; {waits}")
        for spec, _ in stuck:
            note_event(self._folder, StallEvent(at=now_utc(), process=spec.name, stacks=stacks))
        units = {restarts.unit_of(spec): (spec, how) for spec, how in reversed(stuck)}  # the first of each decides
        members = [member for spec, _ in units.values() for member in self._restarts.members(spec)]
        # All at once: on a node that does not answer this takes half a minute, in which no signal is seen.
        ended = {e.spec.name: e for e in self._processes.end(members, why=which)}
        for spec, how in reversed(units.values()):
            e = ended[spec.name]
            verdict = self._decide(replace(e, why=how) if e.why else e, now)
            if verdict.ends_run:
                return verdict.ended
        return None

    def _decide(self, ended: ProcessExit, now: float) -> RestartVerdict:
        beating = f"{roles.TRAINER}-0" if ended.spec.role == roles.TRAINER else ended.spec.name
        # The trainer of a service may have nothing to train.
        newest: dict[str, int] | None = {} if ended.spec.role == roles.TRAINER and not self._serves else None
        # What ended is reported once: a file system that fails for a moment must not lose it.
        with contextlib.suppress(OSError):
            ended = restarts.left_in_turn(self._folder, restarts.with_error(ended))
            newest = newest if newest is None else newest_in(self._folder.checkpoints)
        verdict = self._restarts.take(ended, now, self._pulse.worked_s(beating), newest)
        self._pulse.forget(beating)
        for spec in self._restarts.members(ended.spec):
            # At once: the next look would take the last beat of this session for the first of the next.
            with contextlib.suppress(OSError):
                forget_beats(self._folder, spec.role, spec.index)
        self._early = [(at, e) for at, e in self._early if restarts.unit_of(e.spec) != restarts.unit_of(ended.spec)]
        if not verdict.ends_run:
            self._view.note(str(verdict))
            if verdict.abandoned:
                with contextlib.suppress(OSError):
                    self._folder.excluded(ended.spec.name).touch()
            event = AbandonEvent if verdict.abandoned else RestartEvent
            note_event(self._folder, event(at=now_utc(), process=restarts.unit_of(ended.spec), how=verdict.ended.cause))
        return verdict


def end_event(failure: ProcessExit, code: int) -> EndEvent:
    return EndEvent(at=now_utc(), code=code, process=failure.spec.name, how=failure.how(), error=failure.error)


@contextlib.contextmanager
def own_failure_recorded(folder: RunFolder) -> Iterator[None]:
    """Record as the end of the run an error that supervising it raises, such as that of a node that never joins."""
    try:
        yield
    except ArealLoraError as error:
        end = EndEvent(at=now_utc(), code=error.exit_code, process="its launcher", how="failed", error=str(error))
        note_event(folder, end)
        raise


def print_failure(failure: ProcessExit, console: Console) -> None:
    lines = restarts.last_lines(failure.log, LOG_LINES)
    console.print(f"{failure.spec.name} {failure.cause}.", style="bold red", markup=False, soft_wrap=True)
    console.print(f"The last {len(lines)} lines of {failure.log}:", markup=False, soft_wrap=True)
    for line in lines:
        print_line(console, f"  {line}")


ONE_BY_ONE, PART = 8, 8
BACK_S = 300.0
"""A server that neither loads its model nor serves for so long is not waited for."""
SHOWN = 4


class RestartRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``at_once`` servers may be away together; 0: `away_at_once` decides."""

    id: str
    at_once: int


class RestartProgress(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Servers by name: ``now`` with what each waits for, ``failed`` with the reason."""

    id: str
    waiting: list[str]
    now: dict[str, str] = {}
    done: list[str] = []
    failed: dict[str, str] = {}

    @property
    def ended(self) -> bool:
        return not self.waiting and not self.now

    def __str__(self) -> str:
        total = sum(map(len, (self.waiting, self.now, self.done, self.failed)))
        parts = [f"{len(self.done)} of {total} servers restarted"]
        parts += [f"error: {name} does not return: {why}" for name, why in self.failed.items()]
        parts += [f"{name}: {what}" for name, what in list(self.now.items())[:SHOWN]]
        return "; ".join(parts) + (f"; {len(self.now) - SHOWN} more" if len(self.now) > SHOWN else "")


def away_at_once(servers: int, requested: int, min_servers: int) -> int:
    """Servers that may be away together: ``requested``, or by default one of up to 8 and an eighth of more.

    ``min_servers`` remain where there are more.
    """
    wanted = requested or (1 if servers <= ONE_BY_ONE else servers // PART)
    return min(wanted, max(1, servers - min_servers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersSeen:
    """Facts by name of a server: identity of its published file, how often it joined; which load, were abandoned."""

    published: Mapping[str, tuple[int, int]]
    joins: Mapping[str, int]
    loading: Collection[str] = ()
    abandoned: Collection[str] = ()


@dataclass(slots=True)
class _Turn:
    was: tuple[int, int] | None
    joins: int
    alive: float


class Turns:
    """Which server restarts when, and the ``progress`` of that. Pure: time and facts are passed in."""

    def __init__(self, request: str, order: Sequence[str], at_once: int) -> None:
        self.progress, self._at_once = RestartProgress(id=request, waiting=list(order)), at_once
        self._turns: dict[str, _Turn] = {}

    def step(self, seen: ServersSeen, now: float) -> list[str]:
        """Settle the turns that are over; returns the servers that are to leave and have not left."""
        progress = self.progress
        for name, turn in list(self._turns.items()):
            published = seen.published.get(name)
            if published is not None or name in seen.loading:
                turn.alive = now
            if published not in (None, turn.was) and seen.joins.get(name, 0) > turn.joins:
                progress.done.append(name)
            elif name in seen.abandoned:
                progress.failed[name] = "it left, and its launcher does not restart it"
            elif now - turn.alive > BACK_S:
                progress.failed[name] = f"it has neither loaded nor served for {BACK_S:g} s"
            else:
                away = "loads" if name in seen.loading else "starts"
                back = "leaves in order" if published == turn.was else "joins with the next publish"
                progress.now[name] = back if published else away
                continue
            del self._turns[name], progress.now[name]
        for name in progress.waiting[: max(0, self._at_once - len(self._turns))]:
            was = seen.published.get(name)
            self._turns[name] = _Turn(was, seen.joins.get(name, 0), now)
            progress.now[name] = "leaves in order" if was else "starts"
            progress.waiting.remove(name)
        return [name for name, turn in self._turns.items() if turn.was and seen.published.get(name) == turn.was]


class RollingRestart:
    """Carries out requests, one after the other, as the launcher of the run looks."""

    def __init__(self, config: Config, run_folder: RunFolder, view: LiveConsole) -> None:
        self._folder, self._view, self._min_servers = run_folder, view, config.cluster.min_servers
        self._loading = LoadingServers(run_folder)
        self._turns: Turns | None = None
        self._written, self._problem = b"", ""

    def look(self, now: float) -> None:
        """Take one step; without a request that is one failed opening of a file. A problem is printed once in a row."""
        problem = ""
        try:
            self._step(now)
        except (ConfigError, OSError) as error:
            problem = str(error)
            if problem != self._problem:
                self._view.note(f"servers do not restart in turn: {problem}")
        self._problem = problem

    def _step(self, now: float) -> None:
        if self._turns is None and (request := read_record(self._folder.restart_request, RestartRequest)) is not None:
            endpoints = {i: read_endpoint(self._folder, SERVER, i) for i in published_files(self._folder, SERVER)}
            # Those elsewhere, of which the gateway states the workers, are restarted there.
            order = [f"{SERVER}-{i}" for i, e in sorted(endpoints.items()) if e is not None and e.workers is None]
            at_once = away_at_once(len(order), request.at_once, self._min_servers)
            self._turns = Turns(request.id, order, at_once)
            self._view.note(f"{len(order)} servers restart in turn, {at_once} at once")
        if self._turns is None:
            return
        for name in self._turns.step(self._seen(self._turns.progress), now):
            endpoint = read_endpoint(self._folder, SERVER, int(name.rpartition("-")[2]))
            if endpoint is not None and not (leave := self._folder.leaves / name).exists():
                write_file(leave, f"{endpoint.pid}\n")
        progress = self._turns.progress
        if (content := msgspec.json.encode(progress)) == self._written:
            return
        write_file(self._folder.restart_progress, content)
        self._written = content
        self._folder.restart_request.unlink(missing_ok=True)
        if progress.ended:
            self._view.note(str(progress))
            self._turns = None

    def _seen(self, progress: RestartProgress) -> ServersSeen:
        published = {f"{SERVER}-{i}": file for i, file in published_files(self._folder, SERVER).items()}
        abandoned = [name for name in progress.now if self._folder.excluded(name).exists()]
        joins = {name: self._view.view.joins[name] + self._view.view.resumes for name in published}
        return ServersSeen(published=published, joins=joins, loading=self._loading.names(), abandoned=abandoned)

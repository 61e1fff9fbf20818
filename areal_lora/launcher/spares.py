"""Spare servers of a run in progress: start some on this machine, see to them, and end them with the run.

    claim fresh indices -> start -> watch: failed: restart, within run.max_restarts
                                    signal: leave in order, within the grace time; a second one ends them at once
                                    the run is over: end them at once
                                    the run has another session (a requeued job): end them, start others in it

A spare server joins like a restarted one: it publishes its endpoint in the run's session, with the run's secret.

What the run folder keeps about spare servers: their indices, each used once, and where they were started from.

``spares/server-<index>`` claims an index: no later server of the run gets it, in whichever session.
``spares/job-<id>`` and ``spares/local-<pid>`` name a Slurm job, or a process of one host, that runs spare servers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from rich.console import Console

from areal_lora.config.models import Config
from areal_lora.errors import ConfigError, ExitCode
from areal_lora.launcher.plan import SERVER, ProcessSpec, spare_server
from areal_lora.launcher.restarts import ProcessExit, Pulse, Restarts
from areal_lora.launcher.slurm.job_query import look as look_up
from areal_lora.launcher.slurm.states import JobRecord, Phase, explain
from areal_lora.launcher.start import Owner, is_locked
from areal_lora.launcher.supervise import Interrupts, Supervisor
from areal_lora.obs.console import print_line
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import forget_endpoint
from areal_lora.run_folder.status import TIMEOUT_S as HEARTBEAT_TIMEOUT_S
from areal_lora.run_folder.status import forget_beats, last_beats

JOB, LOCAL = "job", "local"


def claim_indices(run_folder: RunFolder, n: int, first: int) -> list[int]:
    """Claim ``n`` server indices that no server of the run has had. Those below ``first`` are the run's own."""
    folder = run_folder.spares
    folder.mkdir(parents=True, exist_ok=True)
    used = [int(path.name.partition("-")[2]) for path in folder.glob(f"{SERVER}-*")]
    index, claimed = max([first, *(i + 1 for i in used)]), list[int]()
    while len(claimed) < n:
        try:
            (folder / f"{SERVER}-{index}").open("x").close()
        except FileExistsError:  # another command claims, too
            pass
        else:
            claimed.append(index)
        index += 1
    return claimed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareStart:
    """One start of spare servers: Slurm job ``id``, or process ``id`` on ``host``."""

    kind: str
    id: str
    path: Path
    host: str = ""
    over: bool = False


def note_job(run_folder: RunFolder, job: str) -> None:
    run_folder.spares.mkdir(parents=True, exist_ok=True)
    (run_folder.spares / f"{JOB}-{job}").touch()


def note_process(run_folder: RunFolder) -> Path:
    """Name this process as one that runs spare servers; the caller removes the file at its end."""
    run_folder.spares.mkdir(parents=True, exist_ok=True)
    me = Owner.me()
    path = run_folder.spares / f"{LOCAL}-{me.host}-{me.pid}"
    path.write_bytes(me.encoded())
    return path


def starts(run_folder: RunFolder) -> list[SpareStart]:
    """All starts that were noted. A process is ``over`` only where that is certain."""
    found = []
    for path in sorted(run_folder.spares.glob(f"{JOB}-*")):
        found.append(SpareStart(kind=JOB, id=path.name.partition("-")[2], path=path))
    for path in sorted(run_folder.spares.glob(f"{LOCAL}-*")):
        owner = Owner.decoded(path.read_bytes())
        found.append(SpareStart(kind=LOCAL, id=str(owner.pid), path=path, host=owner.host, over=owner.is_over()))
    return found


def is_here(start: SpareStart) -> bool:
    return start.host == socket.gethostname()


POLL_S = 0.2
LOOK_S = {"local": 1.0, "slurm": 10.0}
HELD = ("CONFIGURING", "SUSPENDED")
"""States of a job that has nodes while nothing of it runs."""
END_S = 10.0
"""For servers that end at once: uvicorn and vLLM take two seconds."""


class Going(Enum):
    """Whether a run is in progress. ``WAITING``: Slurm holds its job back, or has requeued it."""

    GOING = auto()
    WAITING = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """``secret_ns`` is when the session's secret was made (Unix time), 0 if there is none. Each start makes one."""

    going: Going
    session: str
    secret_ns: int


def run_state(config: Config, folder: RunFolder) -> RunState:
    """State of the run in ``folder``, seen from this machine."""
    current = RunFolder.current(folder.path)
    session, secret_ns = current.session, current.secret.stat().st_mtime_ns if current.secret.exists() else 0
    if config.cluster.kind == "local":
        return RunState(going=Going.GOING if is_locked(folder) else Going.OVER, session=session, secret_ns=secret_ns)
    going = (
        job_going(look_up(folder.job_id.read_text(encoding="ascii").strip())) if folder.job_id.exists() else Going.OVER
    )
    return RunState(going=going, session=session, secret_ns=secret_ns)


def job_going(job: JobRecord) -> Going:
    """Whether the run of ``job`` is in progress. It is, while Slurm does not answer."""
    phase = explain(job).phase
    if phase is Phase.UNKNOWN:
        return Going.OVER if job.forgotten else Going.GOING
    if phase is Phase.OVER:
        return Going.OVER
    return Going.GOING if phase is Phase.RUNNING and job.state not in HELD else Going.WAITING


def run_spares(
    config: Config,
    folder: RunFolder,
    n: int,
    *,
    grace_s: float,
    console: Console,
    state: Callable[[], RunState] | None = None,
) -> int:
    """Run ``n`` spare servers until the run ends or a signal comes. Returns an ``ExitCode``.

    Raises ConfigError if the run is not in progress, EnvironmentError_ for a server that cannot be started.
    """
    look = state or (lambda: run_state(config, folder))
    if look().going is Going.OVER:
        raise ConfigError(str(folder), "no run is in progress there", "start the run first")
    noted = note_process(folder)
    try:
        with Interrupts() as interrupts:
            while not interrupts.count:
                now = look()
                if now.going is Going.OVER:
                    break
                if now.going is Going.GOING and now.secret_ns:
                    code = _session(config, folder, n, now, grace_s, console, look, interrupts)
                    if code != ExitCode.DONE:
                        return code
                    continue  # the run is over, or has another session
                _sleep(LOOK_S[config.cluster.kind], interrupts)
            return ExitCode.DONE
    finally:
        noted.unlink(missing_ok=True)


def _sleep(seconds: float, interrupts: Interrupts) -> None:
    """Sleep until a signal comes, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not interrupts.count and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _session(
    config: Config,
    folder: RunFolder,
    n: int,
    now: RunState,
    grace_s: float,
    console: Console,
    look: Callable[[], RunState],
    interrupts: Interrupts,
) -> int:
    """Servers of one session of the run."""
    run = RunFolder(folder.path, now.session)
    indices = claim_indices(run, n, config.rollout.servers)
    # A server may take a publish's time longer than its grace: it does not break one off.
    stop_s = grace_s + config.weight_sync.timeout_s
    run.logs.mkdir(exist_ok=True)
    with Supervisor(run.logs, stop_s) as supervisor:
        specs = [spare_server(config, run, i, d, grace_s) for i, d in zip(indices, own_devices(config, n), strict=True)]
        print_line(console, f"starting {', '.join(s.name for s in specs)} for {run}")
        supervisor.start(specs)
        watch = _Watch(config, run, now, specs, supervisor, console, look)
        code, in_order = watch.until_end(interrupts)
        if in_order:
            print_line(console, "leaving in order (once more to end at once)")
        else:
            supervisor.terminate()
            time.sleep(POLL_S)  # two signals are two, not one
        supervisor.stop(stop_s if in_order else END_S, interrupted=interrupts)
        for spec in specs:
            forget_endpoint(run, SERVER, spec.index)  # of one that was killed
    return code


class _Watch:
    """Sees to the servers of one session."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        started: RunState,
        specs: list[ProcessSpec],
        supervisor: Supervisor,
        console: Console,
        look: Callable[[], RunState],
    ) -> None:
        self._run, self._began, self._supervisor, self._console, self._look = run, started, supervisor, console, look
        self._restarts = Restarts(specs, {SERVER: config.run.max_restarts}, min_servers=0)
        self._pulse = Pulse({SERVER: HEARTBEAT_TIMEOUT_S})
        self._names = {spec.name for spec in specs}
        self._left = len(specs)
        self._every_s = LOOK_S[config.cluster.kind]

    def until_end(self, interrupts: Interrupts) -> tuple[int, bool]:
        """(exit code, whether the servers leave in order)."""
        next_look = time.monotonic() + self._every_s
        code: int = ExitCode.DONE
        while self._left:
            if interrupts.count:
                return ExitCode.DONE, True
            now = time.monotonic()
            if now >= next_look:
                next_look = now + self._every_s
                state = self._look()
                if state != self._began:
                    print_line(
                        self._console, "the run is over" if state.going is Going.OVER else "the run has another session"
                    )
                    return ExitCode.DONE, False
            code = self._settle(now) or code
            for specs in self._restarts.due(now):
                self._supervisor.start(specs)
            self._supervisor.look_after()
            time.sleep(POLL_S)
        return code, True

    def _settle(self, now: float) -> int:
        """Decide about servers that ended or are stuck. Returns the code of one that is not restarted."""
        self._pulse.look({n: beat for n, beat in last_beats(self._run).items() if n in self._names}, now)
        ended = self._supervisor.poll()
        silent = self._pulse.silent(now)
        for spec in [spec for spec in self._supervisor.running() if spec.name in silent]:
            ended += self._supervisor.end([spec], why=f"sent no heartbeat for {silent[spec.name]:.0f} s")
        code = 0
        for e in ended:
            code = self._decide(e, now) or code
        return code

    def _decide(self, ended: ProcessExit, now: float) -> int:
        self._supervisor.clear([ended])
        name = ended.spec.name
        worked_s = self._pulse.worked_s(name)
        self._pulse.forget(name)
        forget_beats(self._run, SERVER, ended.spec.index)
        if ended.code == ExitCode.DONE:
            print_line(self._console, f"{name} has left")
            self._left -= 1
            return 0
        verdict = self._restarts.take(ended, now, worked_s)
        if verdict.wait_s is not None:
            print_line(self._console, str(verdict))
            return 0
        print_line(self._console, f"{name} {ended.how()} and is not restarted; see {ended.log}")
        self._left -= 1
        return ended.code if ended.code > 0 else ExitCode.COMPONENT_FAILED


def own_devices(config: Config, n: int) -> list[tuple[str, ...]]:
    """Devices of ``n`` servers, from those that Slurm or the user's environment gave; all empty on a CPU.

    Raises ConfigError if they do not suffice.
    """
    variable = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}.get(config.cluster.device)
    if variable is None:
        return [()] * n
    tp = config.rollout.tp
    given = [d for d in os.environ.get(variable, "").split(",") if d]
    if len(given) < n * tp:
        raise ConfigError(
            variable,
            f"{n} servers of {tp} devices need {n * tp}, {len(given)} are given",
            f"set {variable} to devices that the run does not use",
        )
    return [tuple(given[i * tp : (i + 1) * tp]) for i in range(n)]

"""Spare servers of a run in progress: add some here or as Slurm jobs, see to them, and have them leave.

    claim fresh indices -> start -> watch: failed: restart, within run.max_restarts
                                    signal: leave in order, within the grace time; a second one ends them at once
                                    the run is over: end them at once
                                    the run has another session (a requeued job): end them, start others in it

A spare server joins like a restarted one: it publishes its endpoint in the run's session, with the run's secret.

The run folder keeps ``spares/server-<index>``, which claims an index: no later server of the run gets it, in whichever
session. ``spares/job-<id>`` and ``spares/local-<host>-<pid>`` name a Slurm job, or a process, that runs spare servers.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import msgspec
from rich.console import Console

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.errors import ConfigError, ExitCode
from areal_lora.launcher.plan import SERVER, spare_server
from areal_lora.launcher.restarts import ProcessExit, Pulse, Restarts, left_in_turn, silences
from areal_lora.launcher.slurm import job_query
from areal_lora.launcher.slurm.job_steps import KILL_WAIT_S, SpareJob, spare_script
from areal_lora.launcher.slurm.states import JobRecord, Phase, explain
from areal_lora.launcher.start import Owner, holder
from areal_lora.launcher.supervise import Interrupts, Supervisor
from areal_lora.network.addresses import on_loopback
from areal_lora.obs.console import print_line
from areal_lora.processes.startup import VISIBLE
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import claim_indices, forget_endpoint
from areal_lora.run_folder.status import HEARTBEAT_TIMEOUT_S, forget_beats, last_beats

JOB, LOCAL = "job", "local"
POLL_S = 0.2
LOOK_S = {"local": 1.0, "nodes": 1.0, "slurm": 10.0}
HELD = ("CONFIGURING", "SUSPENDED")
"""States of a job that has nodes while nothing of it runs."""
END_S = 10.0
"""For servers that end at once: uvicorn and vLLM take two seconds."""


def note_process(run_folder: RunFolder) -> Path:
    """Name this process as one that runs spare servers; the caller removes the file at its end."""
    run_folder.spares.mkdir(parents=True, exist_ok=True)
    me = Owner.me()
    path = run_folder.spares / f"{LOCAL}-{me.host}-{me.pid}"
    path.write_bytes(msgspec.json.encode(me))
    return path


def starts(run_folder: RunFolder) -> Iterator[tuple[Path, str | Owner]]:
    """The file of each start that was noted, with its Slurm job or process."""
    for path in sorted([*run_folder.spares.glob(f"{JOB}-*"), *run_folder.spares.glob(f"{LOCAL}-*")]):
        if start := path.name.removeprefix(f"{JOB}-") if path.name.startswith(JOB) else Owner.of(path):
            yield path, start


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """``phase`` is RUNNING, OVER, or WAITING: Slurm holds the run's job back, or has requeued it.

    ``secret_ns`` is when the session's secret was made (Unix time), 0 if there is none. Each start makes one.
    """

    phase: Phase
    session: str
    secret_ns: int


def run_state(config: Config, folder: RunFolder) -> RunState:
    """State of the run in ``folder``, seen from this machine."""
    current = RunFolder.current(folder.path)
    session, secret_ns = current.session, current.secret.stat().st_mtime_ns if current.secret.exists() else 0
    if config.cluster.kind != "slurm":
        phase = Phase.RUNNING if holder(folder) else Phase.OVER
    else:
        job = job_query.submitted_job(folder)
        phase = Phase.OVER if job is None else phase_of_run(job_query.look(job))
    return RunState(phase=phase, session=session, secret_ns=secret_ns)


def phase_of_run(job: JobRecord) -> Phase:
    """RUNNING, WAITING or OVER. The run of ``job`` counts as running while Slurm does not answer."""
    phase = explain(job).phase
    if phase is Phase.OVER or job.forgotten:
        return Phase.OVER
    works = phase is Phase.UNKNOWN or (phase is Phase.RUNNING and job.state not in HELD)
    return Phase.RUNNING if works else Phase.WAITING


def run_spares(
    config: Config,
    folder: RunFolder,
    n: int,
    *,
    grace_s: float,
    console: Console,
    state: Callable[[], RunState] | None = None,
) -> int:
    """Run ``n`` spare servers until the run ends or a signal comes. Returns an ``ExitCode``. Raises ConfigError."""
    look, every_s = state or (lambda: run_state(config, folder)), LOOK_S[config.cluster.kind]
    if look().phase is Phase.OVER:
        raise ConfigError(str(folder), "no run is in progress there", "start the run first")
    noted = note_process(folder)
    try:
        with Interrupts() as interrupts:
            while not interrupts.count and (now := look()).phase is not Phase.OVER:
                if now.phase is Phase.RUNNING and now.secret_ns:
                    session = _Session(config, RunFolder(folder.path, now.session), n, grace_s, console)
                    code = session.run(interrupts, look, now)
                    if code != ExitCode.DONE:
                        return code
                    continue  # the run is over, or has another session
                deadline = time.monotonic() + every_s
                while not interrupts.count and time.monotonic() < deadline:
                    time.sleep(POLL_S)
            return ExitCode.DONE
    finally:
        noted.unlink(missing_ok=True)


class _Session:
    """Servers of one session of the run."""

    def __init__(self, config: Config, run: RunFolder, n: int, grace_s: float, console: Console) -> None:
        self._run, self._console, self._every_s = run, console, LOOK_S[config.cluster.kind]
        # A server may take a publish's time longer than its grace: it does not break one off.
        self._stop_s = grace_s + config.weight_sync.timeout_s
        indices, devices = claim_indices(run, n, config.rollout.servers), own_devices(config, n)
        self._specs = [spare_server(config, run, i, d, grace_s) for i, d in zip(indices, devices, strict=True)]
        self._restarts = Restarts(self._specs, {SERVER: config.run.max_restarts}, min_servers=0)
        self._pulse = Pulse({SERVER: HEARTBEAT_TIMEOUT_S})
        self._left = n

    def run(self, interrupts: Interrupts, look: Callable[[], RunState], started: RunState) -> int:
        """Until a signal, the end of all servers, or another state of the run than ``started``: an exit code."""
        self._run.logs.mkdir(exist_ok=True)
        code, in_order, next_look = int(ExitCode.DONE), True, time.monotonic() + self._every_s
        with Supervisor(self._run.logs, self._stop_s) as supervisor:
            print_line(self._console, f"starting {', '.join(s.name for s in self._specs)} for {self._run}")
            supervisor.start(self._specs)
            while self._left and not interrupts.count:
                if (now := time.monotonic()) >= next_look:
                    next_look = now + self._every_s
                    if (state := look()) != started:
                        over, in_order = state.phase is Phase.OVER, False
                        print_line(self._console, "the run is over" if over else "the run has another session")
                        break
                code = self._tick(supervisor, now) or code
                time.sleep(POLL_S)
            if in_order:
                print_line(self._console, "leaving in order (once more to end at once)")
            supervisor.terminate()
            time.sleep(POLL_S)  # two signals are two, not one
            until = time.monotonic() + (self._stop_s if in_order else 0.0)
            while supervisor.running() and interrupts.count < 2 and (now := time.monotonic()) < until:
                if now >= next_look:
                    next_look = now + self._every_s
                    if look() != started:
                        break  # no trainer dismisses them any more
                supervisor.poll()
                time.sleep(POLL_S)
            supervisor.stop(0.0 if interrupts.count > 1 else END_S, interrupted=interrupts)
            for spec in self._specs:
                forget_endpoint(self._run, SERVER, spec.index)  # of one that was killed
        return code if not self._left else ExitCode.DONE

    def _tick(self, supervisor: Supervisor, now: float) -> int:
        """Take note of servers that ended, end stuck ones, restart; returns the code of one that is not restarted."""
        names, code, ended = {spec.name for spec in self._specs}, 0, supervisor.poll()
        if ended or self._pulse.due(now):
            self._pulse.look({name: beat for name, beat in last_beats(self._run).items() if name in names}, now)
        running = supervisor.running()
        silent = silences(self._pulse, self._run, running, now)
        for spec in [spec for spec in running if spec.name in silent]:
            ended += supervisor.end([spec], why=f"sent no heartbeat for {silent[spec.name]:.0f} s")
        for e in ended:
            code = self._decide(e, now) or code
        for specs in self._restarts.due(now):
            supervisor.start(specs)
        return code

    def _decide(self, ended: ProcessExit, now: float) -> int:
        """Returns the code of a server that failed and is not restarted."""
        name = ended.spec.name
        worked_s = self._pulse.worked_s(name)
        self._pulse.forget(name)
        forget_beats(self._run, SERVER, ended.spec.index)
        ended = left_in_turn(self._run, ended)
        if ended.code == ExitCode.DONE and not ended.planned:
            print_line(self._console, f"{name} has left")
            self._do_without(name)
            return 0
        verdict = self._restarts.take(ended, now, worked_s)
        if verdict.wait_s is not None:
            print_line(self._console, str(verdict))
            return 0
        print_line(self._console, f"{name} {ended.how()} and is not restarted; see {ended.log}")
        self._do_without(name)
        return ended.code if ended.code > 0 else ExitCode.COMPONENT_FAILED

    def _do_without(self, name: str) -> None:
        """Do without a server, and let the run know unless its session is over."""
        self._left -= 1
        with contextlib.suppress(FileNotFoundError):
            self._run.excluded(name).touch()


def own_devices(config: Config, n: int) -> list[tuple[str, ...]]:
    """Devices of ``n`` servers, from those that Slurm or the user's environment gave; all empty on a CPU.

    Raises ConfigError if they do not suffice.
    """
    variable = VISIBLE.get(config.cluster.device)
    if variable is None:
        return [()] * n
    tp = config.rollout.tp
    given = [d for d in os.environ.get(variable, "").split(",") if d]
    if len(given) < n * tp:
        reason = f"{n} servers of {tp} devices need {n * tp}, {len(given)} are given"
        raise ConfigError(variable, reason, f"set {variable} to devices that the run does not use")
    return [tuple(given[i * tp : (i + 1) * tp]) for i in range(n)]


def add_servers(run_folder: RunFolder, job: SpareJob, *, nodes: int = 1, here: bool = False, console: Console) -> int:
    """Add servers to a run in progress: as jobs of one on Slurm, else here until it ends. Returns an ``ExitCode``.

    Raises ConfigError where the run has no address that they reach.
    """
    folder = RunFolder(run_folder.path.absolute(), run_folder.session)
    config = read_config(folder)
    if min(job.servers, nodes) < 1:
        raise ConfigError("--servers", "at least one server is added", "give a positive number")
    slurm, held = config.cluster.kind == "slurm", holder(folder)
    elsewhere = not here if slurm else held is not None and held.host != Owner.me().host
    if elsewhere and on_loopback(config.cluster.bind):
        fix = f"areal-lora stop, then areal-lora resume {quote(str(folder))} cluster.bind=0.0.0.0"
        raise ConfigError("cluster.bind", f"servers on other hosts cannot join on {config.cluster.bind}", fix)
    if here or not slurm:
        return run_spares(config, folder, job.servers, grace_s=job.grace_s, console=console)
    if run_state(config, folder).phase is Phase.OVER:
        raise ConfigError(str(folder), "no run is in progress there", "start the run first")
    if job.grace_s >= KILL_WAIT_S:
        print_line(console, f"note: a cancelled job is killed after KillWait, by default {KILL_WAIT_S:g} s")
    for _ in range(nodes):
        number = job_query.submit(spare_script(config, folder, job))
        folder.spares.mkdir(parents=True, exist_ok=True)
        (folder.spares / f"{JOB}-{number}").touch()
        print_line(console, f"submitted Slurm job {number}: {job.servers} servers")
    return ExitCode.DONE


def remove_servers(run_folder: RunFolder, *, job: str = "", console: Console) -> int:
    """Have the spare servers of ``job``, or all, leave in order. Does not wait for them. Returns how many starts."""
    stopped = 0
    for path, start in starts(run_folder):
        if job and job != (start if isinstance(start, str) else str(start.pid)):
            continue
        if isinstance(start, str):
            # To the batch process alone: it ends the servers in order. A plain scancel signals vLLM's processes, too.
            _, problem = job_query.query("scancel", "--batch", "--signal=TERM", start)
            text = f"job {start}: {problem or 'stopping'}"
            stopped += not problem
            path.unlink(missing_ok=True)
        elif start.is_over():
            path.unlink(missing_ok=True)
            continue
        elif start.here:
            os.kill(start.pid, signal.SIGTERM)
            text = f"process {start.pid}: stopping"
            stopped += 1
        else:
            text = f"process {start.pid} is on {start.host}: end it there with kill {start.pid}"
        print_line(console, text)
    if not stopped:
        print_line(console, "no spare servers of this run were found")
    return stopped

"""Stop a run, so that ``areal-lora resume RUN`` can continue it; restart its servers while it continues."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from shlex import quote
from typing import Annotated

import msgspec
import typer

from areal_lora.cli.find_run import Run, find_run, local_processes
from areal_lora.config.recorded import read_config, read_config_here
from areal_lora.errors import ConfigError, ExitCode, ProcessFailed
from areal_lora.launcher import spares
from areal_lora.launcher.slurm.job_query import cancel, look, submitted_job
from areal_lora.launcher.slurm.states import Phase, explain
from areal_lora.launcher.start import holder
from areal_lora.launcher.supervise import STOP_GRACE_S
from areal_lora.launcher.watch import RestartProgress, RestartRequest
from areal_lora.run_folder.paths import RunFolder, read_record, write_file

POLL_S, REMIND_S = 0.1, 2.0
SLACK_S = 30.0
"""A stop takes at most `STOP_GRACE_S` and some seconds; after so many more it counts as stuck."""
SLURM_END_S = 180.0


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="kill at once, without a grace for the processes")] = False,
) -> None:
    """Stop a run and wait for its end: the launcher here, or its Slurm job, which is not requeued.

    Durable steps are kept; `areal-lora resume` continues from the newest checkpoint.
    """
    folder = find_run(run)
    if read_config_here(folder).cluster.kind == "slurm":
        stop_job(folder, now)
    else:
        stop_launcher(folder, now)


def stop_launcher(folder: RunFolder, now: bool) -> None:
    """TERM to the launcher (twice for ``now``), then wait for it and for the processes of the run."""
    held = holder(folder)
    if held is None:
        if local_processes(folder):
            _wait_for_processes(folder)
        print(f"No launcher works in {folder}: nothing to stop.")
        return
    if not held.here:
        fix = f"run this command there, or kill -TERM {held.pid} there"
        raise ConfigError(str(folder), f"its launcher is process {held.pid} on {held.host}", fix)
    print(f"Stopping {folder}: TERM to launcher {held.pid}", flush=True)
    for _ in range(2 if now else 1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(held.pid, signal.SIGTERM)
        if now:
            time.sleep(3 * POLL_S)  # two signals at once would count as one

    def left() -> str:
        return ", ".join(local_processes(folder)) or "the launcher itself"

    if not _wait_until_over(lambda: holder(folder) == held, left, STOP_GRACE_S + SLACK_S):
        fix = f"areal-lora stop {quote(str(folder))} --now"
        raise ProcessFailed(f"{folder}: launcher {held.pid} is still there (fix: {fix})")
    _wait_for_processes(folder)
    print_stopped(folder, "Stopped")


def print_stopped(folder: RunFolder, what: str) -> None:
    if folder.report.is_file():
        print(f"report: {folder.report}")
    print(f"{what}. areal-lora resume {quote(str(folder))} continues from the newest checkpoint.")


def _wait_for_processes(folder: RunFolder) -> None:
    """Wait for processes whose launcher has ended; its guardian ends them within seconds."""

    def left() -> str:
        return ", ".join(f"{name} (process {pid})" for name, pid in local_processes(folder).items())

    if not _wait_until_over(left, lambda: f"{left()}, whose launcher has ended", SLACK_S):
        raise ProcessFailed(f"{folder}: {left()} still run without a launcher (fix: kill -KILL them)")


def _wait_until_over(works: Callable[[], object], left: Callable[[], str], most_s: float) -> bool:
    """Whether it is over within ``most_s``. Meanwhile print what ``left`` returns."""
    started = reminded = time.monotonic()
    while works():
        if (now := time.monotonic()) > started + most_s:
            return False
        if now > reminded + REMIND_S:
            reminded = now
            print(f"waiting for {left()}", flush=True)
        time.sleep(POLL_S)
    return True


def stop_job(folder: RunFolder, now: bool) -> None:
    """Cancel the job of the folder and wait until Slurm reports its end."""
    if (number := submitted_job(folder)) is None:
        raise ConfigError(str(folder.job_id), "no job was submitted for this run folder", "nothing to stop")
    text = explain(look(number))
    if text.phase is Phase.OVER:
        print(f"Job {number} is over: {text.what}.")
        return
    if text.phase is Phase.UNKNOWN:
        raise ConfigError(str(folder.job_id), text.what, "run the command where scontrol works")
    print(f"Stopping {folder}: scancel {number}", flush=True)
    cancel(number, now=now)
    deadline, shown = time.monotonic() + SLURM_END_S, ""
    while (text := explain(look(number))).phase is not Phase.OVER:
        if text.phase is Phase.UNKNOWN:
            break
        if time.monotonic() > deadline:
            raise ProcessFailed(
                f"job {number} after {SLURM_END_S:g} s: {text.what} (fix: scancel --signal=KILL {number})"
            )
        if text.what != shown:
            shown = text.what
            print(f"waiting: {shown}", flush=True)
        time.sleep(0.5)
    print_stopped(folder, f"Stopped: {text.what}")


def restart_servers(
    run: Run,
    at_once: Annotated[int, typer.Option(min=0, help="servers away together; 0: one, of more than 8 an eighth")] = 0,
) -> None:
    """Restart all rollout servers in turn: each leaves in order, starts and joins; the others serve meanwhile.

    Ctrl-C ends the command, not the restart; the command again follows it. Exit code 70 if one does not return.
    """
    run_folder, shown = find_run(run), ""
    config = read_config(run_folder)
    state = spares.run_state(config, run_folder)
    if state.phase is not Phase.RUNNING:
        raise ConfigError(str(run_folder), "no run is in progress there", "start the run first")
    folder = RunFolder(run_folder.path, state.session)
    progress = read_record(folder.restart_progress, RestartProgress)
    if progress is not None and not progress.ended:
        print("a restart is in progress")
        expected = progress.id
    elif (request := read_record(folder.restart_request, RestartRequest)) is not None:
        expected = request.id
    else:
        expected = str(time.time_ns())
        request = RestartRequest(id=expected, at_once=at_once)
        write_file(folder.restart_request, msgspec.json.encode(request))
    every_s = spares.LOOK_S[config.cluster.kind]
    next_look = time.monotonic() + every_s
    while True:
        progress = read_record(folder.restart_progress, RestartProgress)
        progress = progress if progress is not None and progress.id == expected else None
        if (line := "waiting for the launcher" if progress is None else str(progress)) != shown:
            print(shown := line, flush=True)
        if progress is not None and progress.ended:
            raise typer.Exit(ExitCode.COMPONENT_FAILED if progress.failed else ExitCode.DONE)
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + every_s
            if spares.run_state(config, run_folder) != state:
                print("the run has ended, or started again with all its servers")
                return
        time.sleep(POLL_S)

"""Add rollout servers to a run in progress, and have them leave in order."""

from __future__ import annotations

import os
import signal
import socket

from rich.console import Console

from areal_lora.config.recorded import read_config
from areal_lora.errors import ConfigError, ExitCode
from areal_lora.launcher.slurm import job_query
from areal_lora.launcher.slurm.job_steps import KILL_WAIT_S, SpareJob, spare_script
from areal_lora.launcher.spares import JOB, Going, run_spares, run_state, starts
from areal_lora.obs.console import print_line
from areal_lora.run_folder.paths import RunFolder


def add_servers(run_folder: RunFolder, job: SpareJob, *, nodes: int = 1, here: bool = False, console: Console) -> int:
    """Add servers to a run in progress: as jobs of one on Slurm, else here until it ends. Returns an ``ExitCode``."""
    folder = RunFolder(run_folder.path.absolute(), run_folder.session)
    config = read_config(folder)
    if min(job.servers, nodes) < 1:
        raise ConfigError("--servers", "at least one server is added", "give a positive number")
    if here or config.cluster.kind == "local":
        return run_spares(config, folder, job.servers, grace_s=job.grace_s, console=console)
    if run_state(config, folder).going is Going.OVER:
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
    for start in starts(run_folder):
        if job and start.id != job:
            continue
        if start.kind == JOB:
            # To the batch process alone: it ends the servers in order. A plain scancel signals vLLM's processes, too.
            _, problem = job_query.query("scancel", "--batch", "--signal=TERM", start.id)
            text = f"job {start.id}: {problem or 'stopping'}"
            stopped += not problem
            start.path.unlink(missing_ok=True)
        elif start.over:
            start.path.unlink(missing_ok=True)
            continue
        elif start.host == socket.gethostname():
            os.kill(int(start.id), signal.SIGTERM)
            text = f"process {start.id}: stopping"
            stopped += 1
        else:
            text = f"process {start.id} is on {start.host}: end it there with kill {start.id}"
        print_line(console, text)
    if not stopped:
        print_line(console, "no spare servers of this run were found")
    return stopped

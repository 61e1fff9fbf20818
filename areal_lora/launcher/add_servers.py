"""Add rollout servers to a run in progress: ``python -m areal_lora.launcher.add_servers RUN [--servers N]``.

For a run on Slurm it submits ordinary jobs of one node each; for a local run, and with ``--here``, it runs the
servers on this machine until the run ends or a signal comes. ``remove_servers`` ends them in order.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from rich.console import Console

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.errors import ArealLoraError, ConfigError, EnvironmentError_, ExitCode
from areal_lora.launcher.slurm.job_steps import KILL_WAIT_S, SpareJob, spare_script
from areal_lora.launcher.spares import JOB, Going, is_here, note_job, run_spares, run_state, starts
from areal_lora.obs.console import print_line
from areal_lora.run_folder.paths import RunFolder

GRACE_S = 20.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.launcher.add_servers", description=__doc__)
    parser.add_argument("run", type=RunFolder.current)
    parser.add_argument("--servers", type=int, default=1, help="servers, or servers of each node")
    parser.add_argument("--nodes", type=int, default=1, help="Slurm jobs of one node each")
    parser.add_argument("--time", default="", help="time limit of the Slurm jobs")
    parser.add_argument("--partition", default="", help="partition of the Slurm jobs")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="seconds for requests in progress at a leave")
    parser.add_argument("--here", action="store_true", help="on this machine, also for a run on Slurm")
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    try:
        return add_servers(
            args.run,
            servers=args.servers,
            nodes=args.nodes,
            time_limit=args.time,
            partition=args.partition,
            grace_s=args.grace_s,
            here=args.here,
            console=console,
        )
    except ArealLoraError as error:
        Console(stderr=True, highlight=False).print(str(error), markup=False, soft_wrap=True)
        return error.exit_code


def add_servers(
    run_folder: RunFolder,
    *,
    servers: int,
    nodes: int = 1,
    time_limit: str = "",
    partition: str = "",
    grace_s: float = GRACE_S,
    here: bool = False,
    console: Console,
) -> int:
    """Submit jobs of spare servers for a run on Slurm; else run them here until the run ends. Returns an ``ExitCode``.

    Raises ConfigError if the run is not in progress, EnvironmentError_ if Slurm refuses a job.
    """
    folder = RunFolder(run_folder.path.absolute(), run_folder.session)
    config = read_config(folder)
    if min(servers, nodes) < 1:
        raise ConfigError("--servers", "at least one server is added", "give a positive number")
    if here or config.cluster.kind == "local":
        return run_spares(config, folder, servers, grace_s=grace_s, console=console)
    if run_state(config, folder).going is Going.OVER:
        raise ConfigError(str(folder), "no run is in progress there", "start the run first")
    if grace_s >= KILL_WAIT_S:
        print_line(console, f"note: a cancelled job is killed after KillWait, by default {KILL_WAIT_S:g} s")
    job = SpareJob(servers=servers, grace_s=grace_s, time_limit=time_limit, partition=partition)
    for _ in range(nodes):
        print_line(console, f"submitted Slurm job {_submit(config, folder, job)}: {servers} servers")
    return ExitCode.DONE


def remove_servers(run_folder: RunFolder, *, job: str = "", console: Console) -> int:
    """Have the spare servers of ``job``, or all, leave in order. Does not wait for them. Returns how many starts."""
    stopped = 0
    for start in starts(run_folder):
        if job and start.id != job:
            continue
        if start.kind == JOB:
            # To the batch process alone: it ends the servers in order. A plain scancel signals vLLM's processes, too.
            done = _slurm("scancel", "--batch", "--signal=TERM", start.id)
            text = f"job {start.id}: " + ("stopping" if not done.returncode else " ".join(done.stderr.split()))
            stopped += not done.returncode
            start.path.unlink(missing_ok=True)
        elif start.over:
            start.path.unlink(missing_ok=True)
            continue
        elif is_here(start):
            os.kill(int(start.id), signal.SIGTERM)
            text = f"process {start.id}: stopping"
            stopped += 1
        else:
            text = f"process {start.id} is on {start.host}: end it there with kill {start.id}"
        print_line(console, text)
    if not stopped:
        print_line(console, "no spare servers of this run were found")
    return stopped


def _submit(config: Config, folder: RunFolder, job: SpareJob) -> str:
    done = _slurm("sbatch", "--parsable", stdin=spare_script(config, folder, job, __spec__.name))
    if done.returncode:
        raise EnvironmentError_(f"sbatch refused the job: {' '.join(done.stderr.split())} (fix: see cluster.slurm)")
    number = done.stdout.strip().partition(";")[0]
    note_job(folder, number)
    return number


def _slurm(program: str, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EnvironmentError_(f"{program} is not on this machine (fix: run this on a login node)") from None


if __name__ == "__main__":
    sys.exit(main())

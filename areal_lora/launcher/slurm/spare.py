"""The batch script of a job of spare servers: an ordinary job of one node. Pure.

The script becomes the process that supervises the servers of its node (``launcher.spares``), which ends with the run.
A job is never requeued: the run does without it, and another one can be submitted.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.launcher.slurm.directives import quoted
from areal_lora.network.addresses import NODES_VARIABLE
from areal_lora.run_folder.paths import RunFolder

KILL_WAIT_S = 30.0
"""Slurm's default time between the SIGTERM of a cancelled job and SIGKILL (``KillWait``)."""
_GRES = {"cuda": "gpu", "npu": "npu"}
LEAD_S = 90
"""Time between Slurm's signal to the script and the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareJob:
    """One job on one node. ``time_limit`` and ``partition`` replace those of the run's configuration if set."""

    servers: int
    grace_s: float
    time_limit: str = ""
    partition: str = ""


def spare_script(config: Config, run_folder: RunFolder, job: SpareJob, module: str) -> str:
    """The whole batch script as text. ``module`` is the program that supervises the servers."""
    cluster, rollout, slurm = config.cluster, config.rollout, config.cluster.slurm
    devices = job.servers * rollout.tp
    cpus = job.servers * rollout.threads * rollout.tp
    kind = [slurm.gres_type] if slurm.gres_type else []
    named = {
        "time": job.time_limit or slurm.time_limit,
        "partition": job.partition or slurm.partition,
        "account": slurm.account,
    }
    log = str(run_folder.log("servers-JOB")).replace("%", "%%").replace("servers-JOB", "servers-%j")
    options = [
        f"--job-name={config.run.name}-servers",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={cpus}",
        *([] if cluster.device == "cpu" else [f"--gres={':'.join([_GRES[cluster.device], *kind, str(devices)])}"]),
        *(f"--{name}={quoted(value)}" for name, value in named.items() if value),
        f"--output={quoted(log)}",
        "--open-mode=append",
        "--no-requeue",
        f"--signal=B:TERM@{LEAD_S}",
        *slurm.extra,
    ]
    command = [sys.executable, "-m", module, str(run_folder), "--here"]
    command += ["--servers", str(job.servers), "--grace-s", f"{job.grace_s:g}"]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "set -u",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 69",
            # The address towards the run's nodes, not only towards this job's own.
            f'export {NODES_VARIABLE}="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr "\\n" " ")"',
            *slurm.setup,
            "# One process supervises the servers. Slurm's signals reach it first.",
            f"exec {shlex.join(command)}",
            "",
        ]
    )

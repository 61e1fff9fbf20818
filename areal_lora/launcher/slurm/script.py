"""The batch script of a run: the request to Slurm, and the start of the supervisor inside the job.

All decisions are the supervisor's (``launcher.slurm.job``). The script forwards signals to it through a pipe, which
keeps them until the supervisor reads: none is lost however early it comes.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.errors import EnvironmentError_
from areal_lora.launcher.plan import CONTROLLER, SERVER, TRAINER, JobPlan
from areal_lora.launcher.slurm.directives import directives, step_options

SUPERVISOR = "areal_lora.launcher.slurm.job"
STEP = ("--overlap", "--kill-on-bad-exit=1", "--distribution=arbitrary", "--open-mode=append")
"""srun options of every step. ``--nodelist`` would override the host file of the distribution."""


def sbatch_script(config: Config, plan: JobPlan) -> str:
    """The whole batch script as text."""
    parts = [
        "#!/bin/bash",
        *directives(config, plan),
        "",
        *_steps(config, plan),
        _FIRST,
        f"cd {shlex.quote(str(Path.cwd()))} || exit 69",
        f"SUPERVISOR=({shlex.join([sys.executable, '-m', SUPERVISOR, '--run-folder', str(plan.run_folder)])})",
        _REST,
    ]
    return "\n".join(parts)


def _steps(config: Config, plan: JobPlan) -> list[str]:
    """For the reader: the steps that the supervisor starts."""
    lines = ["# The supervisor starts these steps, and restarts one that fails:"]
    for role in (SERVER, CONTROLLER, TRAINER):
        specs = plan.role(role)
        nodes = " ".join(map(str, sorted({spec.node for spec in specs})))
        options = shlex.join(["srun", *STEP, *step_options(config, plan, role)])
        count = f"{len(specs)} steps of one task" if role == SERVER else f"one step of {len(specs)} tasks"
        lines.append(f"#   {role}: {count if len(specs) > 1 else 'one task'} on nodes {nodes}: {options}")
    return lines


_FIRST = """
set -u
# Signals are kept from the first line on, and forwarded to the supervisor as words.
EARLY=
trap 'EARLY+="USR1 "' USR1
trap 'EARLY+="TERM "' TERM
"""

_REST = """
exec 3>&1
coproc JOB { trap '' USR1 TERM; exec "${SUPERVISOR[@]}" >&3 2>&1; }
exec 4>&"${JOB[1]}"
PID=$JOB_PID
trap '' PIPE
trap 'HEARD=1; echo USR1 >&4' USR1
trap 'HEARD=1; echo TERM >&4' TERM
for WORD in $EARLY; do echo "$WORD" >&4; done
# wait ends early at a signal.
while HEARD=; wait "$PID"; CODE=$?; [ -n "$HEARD" ]; do :; done
if [ "$CODE" -gt 128 ] && [ "$CODE" -ne 143 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  echo "The supervisor was killed by signal $((CODE - 128)): the job is requeued"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
"""


def submit(config: Config, plan: JobPlan, prepare: Callable[[], None]) -> str:
    """Submit the job, ``prepare`` its run folder, let it start. Returns the job id; raises EnvironmentError_.

    A job that Slurm refuses leaves the folder as it was.
    """
    text = sbatch_script(config, plan)
    script = plan.run_folder.job_script
    if shutil.which("sbatch") is None:
        prepare()
        script.write_text(text, encoding="utf-8")
        raise EnvironmentError_(
            f"sbatch is not on this machine (fix: run `sbatch {script}` where it is, or set cluster.kind=local)"
        )
    # Held, because it would start with the folder as it is now.
    job = _slurm("sbatch", "--parsable", "--hold", stdin=text, fix="see cluster.slurm").partition(";")[0]
    try:
        prepare()
        script.write_text(text, encoding="utf-8")
        plan.run_folder.job_id.write_text(f"{job}\n", encoding="ascii")
        plan.run_folder.job_requeues.unlink(missing_ok=True)
        _slurm("scontrol", "release", job, fix="submit again")
    except (OSError, EnvironmentError_):
        _slurm("scancel", job, fix=f"scancel {job}")
        raise
    return job


def _slurm(program: str, *arguments: str, fix: str, stdin: str | None = None) -> str:
    """Return the output of a Slurm command. Raises EnvironmentError_ if the command is missing or fails."""
    try:
        done = subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EnvironmentError_(f"{program} is not on this machine (fix: {fix})") from None
    if done.returncode:
        raise EnvironmentError_(f"{program} refused the job: {' '.join(done.stderr.split())} (fix: {fix})")
    return done.stdout.strip()

"""Submit the batch script of a run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from areal_lora.config.models import Config
from areal_lora.errors import EnvironmentError_
from areal_lora.launcher.plan import JobPlan
from areal_lora.launcher.slurm.script import sbatch_script


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
    # Held, because it would begin with the folder as it is now.
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

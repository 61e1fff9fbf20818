"""The batch script of a run, and the task script of a step, as text; `submit` gives the first to Slurm.

All decisions in a job are the supervisor's (``launcher.slurm.job``). The batch script forwards signals to it through a
pipe, which keeps them until the supervisor reads.

A heterogeneous job has one block of ``#SBATCH`` lines for each component. Slurm hands some options of the first one
(memory, account) to the others and some not (GPUs): each block has all of its nodes', the first one the job's, too.

A task script is bash, one for each process of the unit. Slurm signals all processes of a task, so this shell outlives
the working process and records its code. srun knows only the highest code of its tasks, which a killed peer has.
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.config.sections.run import SlurmComponent, guarded
from areal_lora.config.sizing.slots import Pool
from areal_lora.errors import EnvironmentError_, ExitCode
from areal_lora.launcher.plan import CONTROLLER, ROLES, SERVER, TRAINER, JobPlan, ProcessSpec
from areal_lora.launcher.slurm import job_query
from areal_lora.run_folder.paths import RunFolder

SIGNAL_LEAD_S = 60
"""Time between Slurm's signal to the script and the time limit."""
_GRES = {"cuda": "gpu", "npu": "npu"}


def directives(config: Config, plan: JobPlan) -> list[str]:
    """The ``#SBATCH`` lines, in blocks of one component each."""
    slurm = config.cluster.slurm
    components: list[SlurmComponent | None] = [*slurm.components] or [None]
    # In a file name % starts a replacement.
    log = str(plan.run_folder.log("job-JOB")).replace("%", "%%").replace("job-JOB", "job-%j")
    of_the_job = [f"--job-name={config.run.name}", f"--output={quoted(log)}", "--open-mode=append", "--requeue"]
    of_the_job.append(f"--signal=B:USR1@{SIGNAL_LEAD_S}")
    lines: list[str] = []
    for i, (pool, component) in enumerate(zip(plan.pools, components, strict=True)):
        if i:
            lines += ["", "#SBATCH hetjob"]
        options = _of_the_nodes(config, plan, pool, component)
        options = options if i else [*of_the_job, *options, *slurm.extra]
        lines += [f"#SBATCH {option}" for option in [*options, *(component.extra if component else [])]]
    return lines


def step_options(config: Config, plan: JobPlan, role: str) -> list[str]:
    """Words for an srun that starts processes of ``role``: all but nodes, tasks, output and the command.

    ``--mem=0`` gives the step the memory of its job: a cluster's default memory per CPU would give it less.
    ``--gpu-bind=none``: the plan chooses the devices of a process, by their number on the node. ``--cpu-bind=none``:
    steps overlap, and one that binds may bind to the cores of another step of its node. No ``--cpus-per-task``, which
    means ``--exact``: overlapping steps would all be confined to the first cores of their node.
    """
    specs = plan.role(role)
    words = [f"--het-group={plan.pool_of(specs[0].node)}"] if len(plan.pools) > 1 else []
    words += ["--mem=0", "--cpu-bind=none"]
    words += [] if config.cluster.device == "cpu" else ["--gpu-bind=none"]
    return [*words, *config.cluster.slurm.srun_extra.get(ROLES[role], [])]


def quoted(text: str) -> str:
    """A value of a ``#SBATCH`` line: sbatch reads double quotes and backslashes much as a shell does."""
    if all(c.isalnum() or c in "/._-%+=:,@" for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def node_options(config: Config, component: SlurmComponent | None, devices: int, **given: str) -> list[str]:
    """What nodes with so many ``devices`` have to offer, and whose they are: as ``given``, else as configured.

    The component's value counts, or that of the job where it is unset; empty: none.
    """
    values = config.cluster.slurm.model_dump() | (component.model_dump(exclude_none=True) if component else {})
    words = (_GRES.get(config.cluster.device), values["gres_type"], str(devices))
    named = {
        "gres": ":".join(filter(None, words)) if devices else None,
        "mem": values["mem"],
        "time": given.get("time") or values["time_limit"],
        "partition": given.get("partition") or values["partition"],
    }
    return [f"--{name}={quoted(value)}" for name, value in named.items() if value]


def _of_the_nodes(config: Config, plan: JobPlan, pool: Pool, component: SlurmComponent | None) -> list[str]:
    nodes = range(pool.first_node, pool.first_node + pool.nodes)
    here = [[spec for spec in plan.processes if spec.node == node] for node in nodes]
    options = [
        f"--nodes={pool.nodes}",
        f"--ntasks-per-node={max(1, *(len(specs) for specs in here))}",
        f"--mincpus={max(1, *(sum(spec.cpus for spec in specs) for specs in here))}",
    ]
    options += node_options(config, component, pool.devices_per_node)
    # The job outlives a lost node, where enough servers remain.
    return options + (["--no-kill"] if plan.nodes > 1 else [])


SUPERVISOR = "areal_lora.launcher.slurm.job"
STEP = ("--overlap", "--kill-on-bad-exit=1", "--distribution=arbitrary", "--open-mode=append")
"""srun options of every step. ``--nodelist`` would override the host file of the distribution."""


def sbatch_script(config: Config, plan: JobPlan) -> str:
    parts = ["#!/bin/bash", *directives(config, plan), "", *_steps(config, plan), _FIRST]
    parts.append(f"cd {shlex.quote(str(Path.cwd()))} || exit 69")
    supervisor = [sys.executable, "-m", SUPERVISOR, "--run-folder", str(plan.run_folder)]
    return "\n".join([*parts, f"SUPERVISOR=({shlex.join(supervisor)})", _REST])


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
    job = job_query.submit(text, "--hold")
    try:
        prepare()
        script.write_text(text, encoding="utf-8")
        plan.run_folder.job_id.write_text(f"{job}\n", encoding="ascii")
        plan.run_folder.job_requeues.unlink(missing_ok=True)
        job_query.run("scontrol", "release", job, fix="submit again")
    except (OSError, EnvironmentError_):
        job_query.run("scancel", job, fix=f"scancel {job}")
        raise
    return job


FIRST = "first"
STARTED = ".started"


def task_script(specs: Sequence[ProcessSpec], setup: Sequence[str], run_folder: RunFolder, exits: Path) -> str:
    """A script that runs ``specs[SLURM_PROCID]``.

    Args:
        setup: Shell lines to run first; one that fails ends the task with 69.
        exits: Folder that takes ``<process>.started``, ``<process>.<code>`` and the link ``first``.
    """
    names = []
    for i, spec in enumerate(specs):
        command = ["env", *(f"{name}={value}" for name, value in spec.env.items()), *spec.argv]
        names.append(f"  {i}) NAME={spec.name}; PROCESS=({shlex.join(command)}) ;;")
    paths = [f"EXITS={shlex.quote(str(exits))}", f"REQUEUE={shlex.quote(str(run_folder.requeue_request))}"]
    lines = guarded(setup, f"record {int(ExitCode.MISSING)}")
    return "\n".join(["#!/bin/bash", 'case "$SLURM_PROCID" in', *names, "esac", *paths, _RECORD, *lines, _WORK])


# Names that Python, torch and vLLM give what they share; a user's own files in /dev/shm stay.
_SHARED = " -o ".join(f"-name '{pattern}'" for pattern in ("sem.*", "psm_*", "torch_*", "vllm*"))

# The link is made once, by the first that fails: no two nodes' clocks are compared.
_RECORD = f"""\
record() {{
  if cd "$EXITS"; then
    echo "$(date -u '+%F %T') UTC on $(hostname)" > ".$NAME"
    mv ".$NAME" "$NAME.$1"
    [ "$1" -eq 0 ] || ln -sT "$NAME.$1" {FIRST} 2>/dev/null
  fi
  # What a killed process leaves: without cgroups Slurm knows no orphans.
  for FOUND in $(grep -lzxsF "AREAL_LORA_TASK=$EXITS/$NAME" /proc/[0-9]*/environ); do
    FOUND=${{FOUND#/proc/}}
    kill -KILL "${{FOUND%/environ}}" 2>/dev/null
  done
  # And their shared memory: this user's, made since this task started, mapped and open nowhere.
  find /dev/shm -maxdepth 1 -type f -user "$(id -u)" -newermt "@$SINCE" \\( {_SHARED} \\) | while read -r FOUND; do
    grep -qs " $(stat -c %i "$FOUND") */dev/shm/" /proc/[0-9]*/maps && continue
    [ -z "$(find /proc/[0-9]*/fd -lname "$FOUND" -print -quit 2>/dev/null)" ] && rm -f "$FOUND"
  done
  exit "$1"
}}
export AREAL_LORA_TASK="$EXITS/$NAME"
SINCE=$(date +%s)
hostname > "$EXITS/$NAME{STARTED}"
HEARD=
trap '' TERM
# From scancel --signal=USR1 without --batch: the job is to be requeued.
trap 'HEARD=1; : > "$REQUEUE"' USR1"""

# `wait` ends early at a signal.
_WORK = """\
( trap - TERM USR1; exec "${PROCESS[@]}" ) &
while HEARD=; wait $!; CODE=$?; [ -n "$HEARD" ]; do :; done
record "$CODE"
"""

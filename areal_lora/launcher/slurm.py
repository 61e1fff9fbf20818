"""Run a plan as one Slurm job: write the script, submit it.

Every role is one job step; an `arbitrary` distribution puts each task on the node that the
plan chose, and a task takes its own environment from the plan by its number in the step. The
job requeues itself a minute before its time limit and after a failure that may not come again
(``run.max_restarts`` times), and resumes from the newest checkpoint. A job that Slurm itself
ends (scancel) or requeues (preemption) only stops its steps.

Each task records the code it ended with in ``exits/``. The first one that is not 0 decides
about the job: srun knows only the highest code, which a killed peer has.
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.errors import NON_RETRYABLE, EnvironmentError_, ExitCode
from areal_lora.launcher.plan import CONTROLLER, SERVER, TRAINER, JobPlan, ProcessSpec
from areal_lora.launcher.start import RunStart
from areal_lora.network.addresses import NODES_VARIABLE

_FINAL = " ".join(str(int(code)) for code in sorted({ExitCode.DONE, *NON_RETRYABLE}))
SIGNAL_LEAD_S = 60
"""Time between Slurm's signal to the script and the time limit."""


def sbatch_script(config: Config, plan: JobPlan) -> str:
    """The whole batch script as text."""
    run = plan.run_folder
    emptied = " ".join(path.name for path in (*run.living(), run.exits))
    scratch = f"$RUN/.{run.secret.name}.job"
    parts = [
        "#!/bin/bash",
        *_directives(config, plan),
        "set -u",
        f"RUN={shlex.quote(str(run))}",
        f"MOST={config.run.max_restarts}",
        f"FINAL={shlex.quote(f' {_FINAL} ')}",
        f"FAILURES={shlex.quote(str(run.job_failures))}",
        f"JOB_FILE={shlex.quote(str(run.job_id))}",
        f"EXITS={shlex.quote(str(run.exits))}",
        f"GRACE_S={math.ceil(config.run.stop_grace_s)}",
        _FUNCTIONS,
        f"cd {shlex.quote(str(Path.cwd()))} || exit 69",
        'mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'export {NODES_VARIABLE}="${{NODES[*]}}"',
        "# A requeued job must meet neither the ports nor the secret of its previous session.",
        f'( cd "$RUN" && rm -rf {emptied} && mkdir -p {emptied} {run.logs.name} ) || exit 70',
        f"( umask 077; head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > \"{scratch}\" )",
        f'mv "{scratch}" "$RUN/{run.secret.name}"',
        "",
    ]
    for role in (SERVER, CONTROLLER, TRAINER):
        parts += _step(config, plan, role)
    return "\n".join([*parts, _WAIT])


def submit(config: Config, plan: JobPlan, start: RunStart) -> str:
    """Submit the job, prepare its run folder, let it start. Returns the job id; raises EnvironmentError_.

    A job that Slurm refuses leaves the folder as it was.
    """
    text = sbatch_script(config, plan)
    script = plan.run_folder.job_script
    if shutil.which("sbatch") is None:
        start.prepare()
        script.write_text(text, encoding="utf-8")
        raise EnvironmentError_(
            f"sbatch is not on this machine (fix: run `sbatch {script}` where it is, or set cluster.kind=local)"
        )
    # Held, because it would begin with the folder as it is now.
    job = _slurm("sbatch", "--parsable", "--hold", stdin=text, fix="see cluster.slurm").partition(";")[0]
    try:
        start.prepare()
        script.write_text(text, encoding="utf-8")
        plan.run_folder.job_id.write_text(f"{job}\n", encoding="ascii")
        plan.run_folder.job_failures.unlink(missing_ok=True)
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


def _directives(config: Config, plan: JobPlan) -> list[str]:
    slurm, cluster = config.cluster.slurm, config.cluster
    cpus = [sum(p.cpus for p in plan.processes if p.node == node) for node in range(plan.nodes)]
    options = [
        f"--job-name={config.run.name}",
        f"--nodes={plan.nodes}",
        f"--ntasks-per-node={max(sum(p.node == n for p in plan.processes) for n in range(plan.nodes))}",
        f"--mincpus={max(cpus)}",
        *([] if cluster.device == "cpu" else [f"--gres=gpu:{cluster.devices_per_node}"]),
        f"--time={slurm.time_limit}",
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        f"--output={plan.run_folder.log('job-%j')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SIGNAL_LEAD_S}",
        *slurm.extra,
    ]
    return [f"#SBATCH {option}" for option in options]


def _step(config: Config, plan: JobPlan, role: str) -> list[str]:
    specs, run = plan.role(role), plan.run_folder
    hosts_file, script = f"$RUN/{run.task_hosts(role).name}", f"$RUN/{run.task_script(role).name}"
    log = f"$RUN/{run.log(f'{role}-%t').relative_to(run)}"
    hosts = " ".join(f'"${{NODES[{spec.node}]}}"' for spec in specs)
    return [
        f"# {role}: {len(specs)} tasks",
        f'printf "%s\\n" {hosts} > "{hosts_file}"',
        f"cat > \"{script}\" <<'END_OF_TASK'",
        "#!/bin/bash",
        *config.cluster.slurm.setup,
        "task() {",
        '  case "$SLURM_PROCID" in',
        *(f"  {i}) {_task_line(spec)} ;;" for i, spec in enumerate(specs)),
        "  esac",
        "}",
        f'NAME="{role}-$SLURM_PROCID"',
        f"EXITS={shlex.quote(str(run.exits))}",
        _TASK_END,
        "END_OF_TASK",
        # --nodelist would override the host file.
        f'SLURM_HOSTFILE="{hosts_file}" srun --overlap --kill-on-bad-exit=1 --distribution=arbitrary \\',
        f"  --nodes={len({spec.node for spec in specs})} --ntasks={len(specs)} "
        f"--cpus-per-task={max(s.cpus for s in specs)} \\",
        f'  --output="{log}" --open-mode=append bash "{script}" &',
        f"{role.upper()}=$!",
        "",
    ]


def _task_line(spec: ProcessSpec) -> str:
    env = dict(spec.env)
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    return f"exec env {variables} {shlex.join(spec.argv)}"


# Slurm signals all processes of a task. This shell outlives the working one and records its exit code.
# The link is made once, by the first that fails: no two nodes' clocks are compared.
_TASK_END = """\
trap '' TERM
( trap - TERM; task )
CODE=$?
if cd "$EXITS"; then
  echo "$(date -u '+%F %T') UTC on $(hostname)" > ".$NAME"
  mv ".$NAME" "$NAME.$CODE"
  [ "$CODE" -eq 0 ] || ln -sT "$NAME.$CODE" first 2>/dev/null
fi
exit "$CODE"
"""

_FUNCTIONS = """\
say() { echo "$(date -u '+%F %T') UTC: $*"; }

# RUNNING also after USR1 and before a preemption with a grace time. COMPLETING or PENDING: Slurm ends or requeues the
# job by itself, after scancel or a preemption.
job_state() {
  for TRY in 1 2 3; do
    squeue -h -j "$SLURM_JOB_ID" -o %T && return
    sleep 2
  done
}

stop_steps() {
  # To the tasks of all steps. srun itself, when signalled, kills its tasks without a grace.
  scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null
  for ((I = 0; I < 10 * GRACE_S; I++)); do
    [ -n "$(jobs -rp)" ] || break
    sleep 0.1
  done
  kill -TERM $(jobs -rp) 2>/dev/null
  wait
}

requeue() {
  STATE=$(job_state)
  if [ "$STATE" = RUNNING ]; then
    say "The job is requeued: $1"
    scontrol requeue "$SLURM_JOB_ID"
  else
    say "The job is ${STATE:-unknown to squeue} and is not requeued by itself"
  fi
}

on_signal() {
  trap '' TERM USR1
  say "$1 arrived: the steps are stopped"
  stop_steps
  requeue "$1 arrived"
  exit 143
}
trap 'on_signal TERM' TERM
trap 'on_signal USR1' USR1

OTHER=$(cat "$JOB_FILE" 2>/dev/null)
if [ "${OTHER:-$SLURM_JOB_ID}" != "$SLURM_JOB_ID" ] && [ -n "$(squeue -h -j "$OTHER" -o %T 2>/dev/null)" ]; then
  say "Slurm job $OTHER works in $RUN (fix: wait for it, or scancel $OTHER)"
  exit 64
fi
echo "$SLURM_JOB_ID" > "$JOB_FILE"
# Meant for a step of as many tasks on each node as sbatch was given.
unset SLURM_NTASKS_PER_NODE
"""

# The trainer's end is the job's end. The script's own exit code is what Slurm records.
_WAIT = """\
REST=("$SERVER" "$CONTROLLER" "$TRAINER")
while true; do
  wait -n -p ENDED "${REST[@]}"
  CODE=$?
  if [ "${ENDED:-}" = "$TRAINER" ] || [ "$CODE" -ne 0 ]; then break; fi
  # A step that ended well early: the others can still fail.
  LEFT=()
  for STEP in "${REST[@]}"; do [ "$STEP" = "$ENDED" ] || LEFT+=("$STEP"); done
  REST=("${LEFT[@]}")
done
trap '' TERM USR1
WHO="A step"
if [ "$CODE" -ne 0 ] && FIRST=$(readlink "$EXITS/first"); then
  CODE=${FIRST##*.}
  WHO=${FIRST%.*}
fi
stop_steps
if [ "$CODE" -eq 0 ]; then exit 0; fi
say "$WHO ended with code $CODE"
case "$FINAL" in *" $CODE "*) exit "$CODE" ;; esac
TIMES=$(cat "$FAILURES" 2>/dev/null || echo 0)
if [ "$TIMES" -lt "$MOST" ]; then
  echo $((TIMES + 1)) > "$FAILURES"
  requeue "$WHO ended with code $CODE; start $((TIMES + 1)) of $MOST after a failure"
fi
exit 70
"""

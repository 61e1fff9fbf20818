"""Run a plan as one Slurm job: write the script, submit it.

Every role is one job step; an `arbitrary` distribution puts each task on the node that the
plan chose, and a task takes its own environment from the plan by its number in the step. The
job requeues itself when it is preempted, before its time is up, and after a failure that may
not come again (``run.max_restarts`` times); each life of it goes on from the newest checkpoint.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from areal_lora.config.addresses import NODES_VARIABLE
from areal_lora.config.models import Config
from areal_lora.errors import SAME_AGAIN, EnvironmentError_, ExitCode
from areal_lora.launcher.plan import CONTROLLER, SERVER, TRAINER, JobPlan, ProcessSpec
from areal_lora.launcher.run_folder import ANEW, JOB_FILE

SCRIPT_NAME = "job.sbatch"
FAILURES_FILE = "job.failures"
_FINAL = " ".join(str(int(code)) for code in sorted({ExitCode.DONE, *SAME_AGAIN}))
SIGNAL_LEAD_S = 60
"""How long before the time limit Slurm signals the script."""


def sbatch_script(config: Config, plan: JobPlan) -> str:
    """The whole batch script as text."""
    parts = [
        "#!/bin/bash",
        *_directives(config, plan),
        "set -u",
        f"RUN={shlex.quote(str(plan.run_folder))}",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 69",
        'mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'export {NODES_VARIABLE}="${{NODES[*]}}"',
        f"MOST={config.run.max_restarts}",
        f"FINAL={shlex.quote(f' {_FINAL} ')}",
        f"FAILURES={shlex.quote(str(plan.run_folder / FAILURES_FILE))}",
        "# A requeued job must meet neither the ports nor the secret of its former life.",
        f'( cd "$RUN" && rm -rf {" ".join(ANEW)} && mkdir -p {" ".join(ANEW)} logs ) || exit 70',
        "( umask 077; head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > \"$RUN/.secret.job\" )",
        'mv "$RUN/.secret.job" "$RUN/secret"',
        "",
    ]
    for role in (SERVER, CONTROLLER, TRAINER):
        parts += _step(config, plan.role(role))
    return "\n".join([*parts, _WAIT])


def submit(config: Config, plan: JobPlan) -> str:
    """Write the script into the run folder and submit it. Returns the job id; raises EnvironmentError_."""
    (plan.run_folder / FAILURES_FILE).unlink(missing_ok=True)
    script = plan.run_folder / SCRIPT_NAME
    script.write_text(sbatch_script(config, plan), encoding="utf-8")
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise EnvironmentError_(
            f"sbatch is not on this machine (fix: run `sbatch {script}` where it is, or set cluster.kind=local)"
        )
    done = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentError_(f"sbatch refused {script}: {' '.join(done.stderr.split())}")
    job = done.stdout.strip().partition(";")[0]
    (plan.run_folder / JOB_FILE).write_text(f"{job}\n", encoding="ascii")
    return job


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
        f"--output={plan.run_folder}/logs/job-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SIGNAL_LEAD_S}",
        *slurm.extra,
    ]
    return [f"#SBATCH {option}" for option in options]


def _step(config: Config, specs: Iterable[ProcessSpec]) -> list[str]:
    specs = list(specs)
    role = specs[0].role
    hosts = " ".join(f'"${{NODES[{spec.node}]}}"' for spec in specs)
    nodes = sorted({spec.node for spec in specs})
    nodelist = ",".join(f"${{NODES[{node}]}}" for node in nodes)
    return [
        f"# {role}: {len(specs)} tasks",
        f'printf "%s\\n" {hosts} > "$RUN/hosts-{role}"',
        f"cat > \"$RUN/task-{role}.sh\" <<'END_OF_TASK'",
        "#!/bin/bash",
        *config.cluster.slurm.setup,
        'case "$SLURM_PROCID" in',
        *(f"  {i}) {_task_line(spec)} ;;" for i, spec in enumerate(specs)),
        "esac",
        "END_OF_TASK",
        f'SLURM_HOSTFILE="$RUN/hosts-{role}" srun --overlap --kill-on-bad-exit=1 --distribution=arbitrary \\',
        f"  --nodes={len(nodes)} --ntasks={len(specs)} --cpus-per-task={max(s.cpus for s in specs)} \\",
        f'  --nodelist="{nodelist}" --output="$RUN/logs/{role}-%t.log" --open-mode=append \\',
        f'  bash "$RUN/task-{role}.sh" &',
        f"{role.upper()}=$!",
        "",
    ]


def _task_line(spec: ProcessSpec) -> str:
    env = dict(spec.env)
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    return f"exec env {variables} {shlex.join(spec.argv)}"


# The trainer's end is the job's end. The script's own exit code is what Slurm records.
_WAIT = """\
stop_steps() {
  kill -TERM "$SERVER" "$CONTROLLER" "$TRAINER" 2>/dev/null
  wait
}
on_preemption() {
  trap '' TERM USR1
  stop_steps
  scontrol requeue "$SLURM_JOB_ID"
  exit 143
}
trap on_preemption TERM USR1

REST=("$SERVER" "$CONTROLLER" "$TRAINER")
while true; do
  wait -n -p FIRST "${REST[@]}"
  CODE=$?
  if [ "$FIRST" = "$TRAINER" ] || [ "$CODE" -ne 0 ]; then break; fi
  # A step that ended well early: the others can still fail.
  LEFT=()
  for STEP in "${REST[@]}"; do [ "$STEP" = "$FIRST" ] || LEFT+=("$STEP"); done
  REST=("${LEFT[@]}")
done
trap '' TERM USR1
stop_steps
case "$FINAL" in *" $CODE "*) exit "$CODE" ;; esac
TIMES=$(cat "$FAILURES" 2>/dev/null || echo 0)
if [ "$TIMES" -lt "$MOST" ]; then
  echo $((TIMES + 1)) > "$FAILURES"
  echo "A step ended with code $CODE; the job starts again ($((TIMES + 1)) of $MOST)"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit 70
"""

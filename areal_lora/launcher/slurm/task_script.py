"""The text of a step's task script: bash on every node of the step, one for each process of the unit.

Slurm signals all processes of a task, so this shell outlives the working process and records the code it ended with.
srun itself knows only the highest code of its tasks, which a killed peer has.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from areal_lora.errors import ExitCode
from areal_lora.launcher.plan import ProcessSpec
from areal_lora.run_folder.paths import RunFolder

FIRST = "first"
STARTED = ".started"


def task_script(specs: Sequence[ProcessSpec], setup: Sequence[str], run_folder: RunFolder, exits: Path) -> str:
    """A script that runs ``specs[SLURM_PROCID]``.

    Args:
        setup: Shell lines to run first; one that fails ends the task with 69.
        exits: Folder that takes ``<process>.started``, ``<process>.<code>`` and the link ``first``.
    """
    return "\n".join(
        [
            "#!/bin/bash",
            'case "$SLURM_PROCID" in',
            *(f"  {i}) {_process(spec)} ;;" for i, spec in enumerate(specs)),
            "esac",
            f"EXITS={shlex.quote(str(exits))}",
            f"REQUEUE={shlex.quote(str(run_folder.requeue_request))}",
            _RECORD,
            *_setup(setup),
            _WORK,
        ]
    )


def _process(spec: ProcessSpec) -> str:
    variables = [f"{name}={value}" for name, value in spec.env.items()]
    return f"NAME={spec.name}; PROCESS=({shlex.join(['env', *variables, *spec.argv])})"


def _setup(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    failed = (
        'CODE=$?; trap - ERR; echo "error: cluster.slurm.setup: $BASH_COMMAND ended with code $CODE'
        f' on $(hostname) (fix: run the lines on such a node)"; record {int(ExitCode.MISSING)}'
    )
    return [f"trap {shlex.quote(failed)} ERR", *lines, "trap - ERR"]


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

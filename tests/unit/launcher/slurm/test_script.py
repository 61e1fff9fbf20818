"""The batch script: bash forwards signals as words, however early they come, and ends with the supervisor's code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.families.registry import known_config
from areal_lora.launcher.plan import make_plan
from areal_lora.launcher.slurm.script import SUPERVISOR, sbatch_script
from tests.support.paths import EXAMPLES


def script(tmp_path: Path, supervisor: str) -> Path:
    """A batch script whose supervisor is the Python text ``supervisor``; its folder has a blank in its name."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], [f"run.root={folder}", "run.name=my-run"])
    text = sbatch_script(config, make_plan(config, Facts(hf_config=known_config(config.model.path))))
    assert text.count(SUPERVISOR) == 1
    (folder / "supervisor.py").write_text(supervisor)
    path = folder / "job.sh"
    path.write_text(text.replace(f"-m {SUPERVISOR}", f"'{folder}/supervisor.py'"))
    for name, said in (("squeue", "echo RUNNING"), ("scontrol", f'echo "$@" >> "{folder}/calls"')):
        (folder / name).write_text(f"#!/bin/bash\n{said}\n")
        (folder / name).chmod(0o755)
    return path


def started(path: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"SLURM_JOB_ID": "17", "PATH": f"{path.parent}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", str(path)], env=environment, stdout=subprocess.PIPE, text=True)


def test_it_asks_slurm_before_its_first_command_and_holds_no_secret(tmp_path: Path) -> None:
    lines = script(tmp_path, "").read_text().splitlines()
    asked = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(asked) < min(commands)
    assert not re.search("[0-9a-f]{64}", "\n".join(lines))
    assert lines[commands[1]].startswith("EARLY=")
    assert lines[commands[2]].startswith("trap "), "signals are kept from the first command on"


@pytest.mark.parametrize("number", [10, 15], ids=["USR1", "TERM"])
def test_signals_arrive_as_words_and_the_supervisors_code_is_the_jobs(tmp_path: Path, number: int) -> None:
    wait = "import sys; print('ready', flush=True); word = sys.stdin.readline(); print('got', word); sys.exit(65)"
    job = started(script(tmp_path, wait))
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(number)
    output, _ = job.communicate(timeout=120)
    assert (job.returncode, output.split()) == (65, ["got", {10: "USR1", 15: "TERM"}[number]])


def test_a_signal_before_the_supervisor_reads_is_kept(tmp_path: Path) -> None:
    slow = "import sys, time; time.sleep(1); print('got', sys.stdin.readline(), sys.stdin.readline())"
    job = started(script(tmp_path, slow))
    traps = f"/proc/{job.pid}/status"

    def caught() -> int:
        return int(next(line.split()[1] for line in Path(traps).read_text().splitlines() if "SigCgt" in line), 16)

    while not caught() >> 9 & 1:
        time.sleep(0.001)
    job.send_signal(10)
    time.sleep(0.2)
    job.send_signal(15)
    output, _ = job.communicate(timeout=120)
    assert (job.returncode, output.split()) == (0, ["got", "USR1", "TERM"])


def test_a_supervisor_that_was_killed_has_the_job_requeued(tmp_path: Path) -> None:
    path = script(tmp_path, "import os; os.kill(os.getpid(), 9)")
    job = started(path)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 137
    assert "The supervisor was killed by signal 9: the job is requeued" in output
    assert (path.parent / "calls").read_text() == "requeue 17\n"


def test_its_interpreter_is_the_one_that_submitted(tmp_path: Path) -> None:
    assert f"SUPERVISOR=({shlex.quote(sys.executable)} " in script(tmp_path, "").read_text()

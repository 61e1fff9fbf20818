"""The batch script: what it says, that bash accepts it, and how it behaves with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lora.config.architectures import known_config
from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import EnvironmentError_
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm import sbatch_script, submit

MOE = Path(__file__).resolve().parents[2] / "examples" / "math" / "gsm8k_grpo_megatron_lora_moe.yaml"


def job(folder: Path, *overrides: str) -> tuple[Config, JobPlan]:
    config = load_config([MOE], [f"run.root={folder}", "run.name=my-run", *overrides])
    return config, make_plan(config, Facts(hf_config=known_config(config.model.path)))


def test_directives(tmp_path: Path) -> None:
    script = sbatch_script(
        *job(tmp_path, "cluster.slurm.partition=gpu", "cluster.slurm.account=me", "cluster.slurm.extra=[--exclusive]")
    )
    directives = re.findall(r"^#SBATCH (.*)$", script, flags=re.M)
    assert {
        "--job-name=my-run", "--nodes=3", "--gres=gpu:8", "--time=24:00:00", "--partition=gpu", "--account=me",
        "--requeue", "--exclusive", "--signal=B:USR1@60",
    } <= set(directives)  # fmt: skip
    assert script.index("#SBATCH") < script.index("set -u"), "sbatch reads directives up to the first command"


def test_every_process_of_the_plan_is_in_the_script_once(tmp_path: Path) -> None:
    config, plan = job(tmp_path)
    script = sbatch_script(config, plan)
    assert script.count("exec env ") == len(plan.processes) == 21
    for rank in range(16):
        assert len(re.findall(rf"^  {rank}\) exec env .* RANK={rank} WORLD_SIZE=16 ", script, flags=re.M)) == 1
    assert not re.search("[0-9a-f]{64}", script), "no secret"


def test_role_setup_lines_run_on_the_nodes(tmp_path: Path) -> None:
    script = sbatch_script(*job(tmp_path, "cluster.slurm.setup=[module load cuda]"))
    assert script.count("\nmodule load cuda\n") == 3


def test_bash_accepts_it(tmp_path: Path) -> None:
    script = sbatch_script(*job(tmp_path / "with a space"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "$@" >> "$CALLS"; fi',
    # Like srun: one task per line of the host file; ends badly when a task does, passes SIGTERM on.
    "srun": """
while [ "$1" != bash ]; do [[ "$1" == --output=* ]] && out="${1#--output=}"; shift; done
i=0; pids=()
while read -r host; do
  SLURM_PROCID=$i NODE=$host "$@" > "${out//%t/$i}" 2>&1 & pids+=($!); i=$((i+1))
done < "$SLURM_HOSTFILE"
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
code=0; for pid in "${pids[@]}"; do wait "$pid" || code=$?; done; exit $code
""",
}


def run_script(
    tmp_path: Path, trainer: str, server: str = "exec sleep 60", controller: str = "exec sleep 60",
    failures: int | None = None, before: Callable[[Path], None] = lambda _: None,
) -> tuple[subprocess.CompletedProcess, Path]:
    """Run the job's script with stand-ins for srun, scontrol and the roles' interpreters."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in {
        **STAND_INS,
        "trainer-python": trainer,
        "server-python": server,
        "controller-python": controller,
    }.items():
        program = bin_folder / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    config, plan = job(
        tmp_path, f"trainer.python={bin_folder}/trainer-python", f"rollout.python={bin_folder}/server-python"
    )
    own_python = plan.role("controller")[0].argv[0]
    script = tmp_path / "job.sh"
    text = sbatch_script(config, plan).replace(f" {own_python} ", f" {bin_folder}/controller-python ")
    script.write_text(text)
    plan.run_folder.mkdir()
    before(plan.run_folder)
    if failures is not None:
        (plan.run_folder / "job.failures").write_text(f"{failures}\n")
    env = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "17",
        "CALLS": str(tmp_path / "calls"),
    }  # fmt: skip
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=30, check=False)
    return done, plan.run_folder


def test_trainer_end_ends_the_job_and_tasks_get_rank_and_node(tmp_path: Path) -> None:
    done, folder = run_script(tmp_path, 'echo "rank $RANK local $LOCAL_RANK on $NODE"')
    assert done.returncode == 0, done.stderr
    expected = [f"rank {r} local {r % 8} on n{r // 8 + 1}\n" for r in range(16)]
    assert [(folder / "logs" / f"trainer-{r}.log").read_text() for r in range(16)] == expected
    assert (folder / "hosts-server").read_text().split() == ["n3"] * 4


@pytest.mark.parametrize(
    "controller", ["exec sleep 60", "exit 0"], ids=["before the others", "after one that ended well"]
)
def test_failing_server_fails_the_job(tmp_path: Path, controller: str) -> None:
    server = 'sleep 1; case "$CUDA_VISIBLE_DEVICES" in 2,3) exit 4;; *) exit 0;; esac'
    done, folder = run_script(tmp_path, "exec sleep 60", server, controller)
    assert done.returncode == 70
    assert (tmp_path / "calls").read_text() == "requeue 17\n"
    assert (folder / "job.failures").read_text() == "1\n"


def test_failures_end_the_job_when_they_are_too_many(tmp_path: Path) -> None:
    done, _ = run_script(tmp_path, "exit 3", failures=3)
    assert done.returncode == 70
    assert not (tmp_path / "calls").exists()


def test_a_code_that_would_come_again_is_kept_and_not_requeued(tmp_path: Path) -> None:
    done, _ = run_script(tmp_path, '[ "$RANK" != 5 ] || exit 65')
    assert done.returncode == 65
    assert not (tmp_path / "calls").exists()


def test_a_requeued_job_keeps_what_a_resume_needs(tmp_path: Path) -> None:
    def before(folder: Path) -> None:
        (folder / "checkpoints" / "math" / "v000003").mkdir(parents=True)
        for name in ("ledger.sqlite", "metrics.jsonl", "config.json"):
            (folder / name).write_text("kept")
        (folder / "logs").mkdir()
        (folder / "logs" / "trainer-0.log").write_text("kept\n")
        for name in ("rendezvous", "status", "heartbeats"):
            (folder / name).mkdir()
            (folder / name / "trainer-0").write_text("old")
        (folder / "secret").write_text("old")

    done, folder = run_script(tmp_path, "exit 0", before=before)
    assert done.returncode == 0, done.stderr
    assert (folder / "checkpoints" / "math" / "v000003").is_dir()
    assert all((folder / name).read_text() == "kept" for name in ("ledger.sqlite", "metrics.jsonl", "config.json"))
    assert not any(list((folder / name).iterdir()) for name in ("rendezvous", "status", "heartbeats"))
    assert len(bytes.fromhex((folder / "secret").read_text())) == 32
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def test_preemption_stops_the_steps_and_requeues(tmp_path: Path) -> None:
    # The trainer's rank 5 plays the scheduler: it signals the batch script, the parent of its step.
    kill = 'if [ "$RANK" = 5 ]; then step=$(ps -o ppid= $PPID); kill -USR1 $(ps -o ppid= $step); fi; exec sleep 60'
    done, _ = run_script(tmp_path, kill.replace("$PPID", "$$"))
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "calls").read_text() == "requeue 17\n"


def test_submitting_without_slurm_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = job(tmp_path)
    plan.run_folder.mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentError_, match=r"sbatch is not on this machine .*job\.sbatch"):
        submit(config, plan)
    assert (plan.run_folder / "job.sbatch").is_file()


def test_submitted_job_id_and_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = job(tmp_path)
    plan.run_folder.mkdir()
    sbatch = tmp_path / "sbatch"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sbatch.write_text("#!/bin/bash\necho '42;cluster'\n")
    sbatch.chmod(0o755)
    (plan.run_folder / "job.failures").write_text("3\n")
    assert submit(config, plan) == "42"
    assert (plan.run_folder / "job.id").read_text() == "42\n"
    assert not (plan.run_folder / "job.failures").exists(), "who submits again begins to count again"
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    with pytest.raises(EnvironmentError_, match=r"sbatch refused .*: invalid partition"):
        submit(config, plan)


def test_tasks_are_told_the_names_of_all_nodes(tmp_path: Path) -> None:
    """They choose their address by the route to these."""
    lines = sbatch_script(*job(tmp_path)).splitlines()
    names = next(i for i, line in enumerate(lines) if line.startswith("mapfile -t NODES "))
    assert lines[names + 1] == 'export AREAL_LORA_NODES="${NODES[*]}"'

"""The batch script: what it says, that bash accepts it, and how it behaves with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.families.published import known_config
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm import sbatch_script, submit
from areal_lora.launcher.start import RunStart
from tests.support.paths import EXAMPLES, SUPPORT

MOE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"


def job(folder: Path, *overrides: str) -> tuple[Config, JobPlan]:
    config = load_config([MOE], [f"run.root={folder}", "run.name=my-run", *overrides])
    return config, make_plan(config, Facts(hf_config=known_config(config.model.path)))


def test_directives(tmp_path: Path) -> None:
    script = sbatch_script(
        *job(tmp_path, "cluster.slurm.partition=gpu", "cluster.slurm.account=me", "cluster.slurm.extra=[--exclusive]")
    )
    directives = re.findall(r"^#SBATCH (.*)$", script, flags=re.M)
    assert {
        "--job-name=my-run",
        "--nodes=3",
        "--gres=gpu:8",
        "--time=24:00:00",
        "--partition=gpu",
        "--account=me",
        "--requeue",
        "--exclusive",
        "--signal=B:USR1@60",
    } <= set(directives)
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
    "squeue": 'cat "$STATE"',
    # Signals every process of the tasks; each task is a process group.
    "scancel": 'echo "$@" >> "$CALLS.scancel"; while read -r group; do kill -TERM -- "-$group"; done < "$CALLS.groups"',
    "srun": f'exec {quote(sys.executable)} -S {quote(str(SUPPORT / "launcher" / "stand_in_srun.py"))} "$@"',
}


def run_script(
    tmp_path: Path,
    trainer: str,
    server: str = "exec sleep 60",
    controller: str = "exec sleep 60",
    failures: int | None = None,
    before: Callable[[Path], None] = lambda _: None,
    state: str = "RUNNING",
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
        tmp_path,
        f"trainer.python={bin_folder}/trainer-python",
        f"rollout.python={bin_folder}/server-python",
        "run.stop_grace_s=3",
    )
    own_python = plan.role("controller")[0].argv[0]
    script = tmp_path / "job.sh"
    text = sbatch_script(config, plan)
    assert text.count(f" {quote(own_python)} ") >= 1
    script.write_text(text.replace(f" {quote(own_python)} ", f" {bin_folder}/controller-python "))
    plan.run_folder.path.mkdir()
    before(plan.run_folder.path)
    if failures is not None:
        (plan.run_folder.path / "job.failures").write_text(f"{failures}\n")
    env = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_ID": "17",
        "CALLS": str(tmp_path / "calls"),
        "STATE": str(tmp_path / "state"),
    }
    (tmp_path / "state").write_text(f"{state}\n")
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=60, check=False)
    return done, plan.run_folder.path


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


def test_the_code_of_the_first_task_that_failed_decides_not_that_of_its_killed_peers(tmp_path: Path) -> None:
    done, folder = run_script(tmp_path, 'if [ "$RANK" = 5 ]; then sleep 1; exit 65; fi; sleep 60')
    assert done.returncode == 65, done.stdout
    assert "trainer-5 ended with code 65" in done.stdout
    assert not (tmp_path / "calls").exists()
    assert (folder / "exits" / "trainer-5.65").read_text().rstrip().endswith(f"UTC on {os.uname().nodename}")
    assert (folder / "exits" / "first").readlink() == Path("trainer-5.65")


def test_a_killed_task_is_the_first_cause_even_if_a_peer_says_something_final_later(tmp_path: Path) -> None:
    trainer = 'case "$RANK" in 5) kill -KILL $$ ;; 6) sleep 1; exit 65 ;; *) sleep 60 ;; esac'
    done, _ = run_script(tmp_path, trainer)
    assert done.returncode == 70, done.stdout
    assert "trainer-5 ended with code 137" in done.stdout
    assert (tmp_path / "calls").read_text() == "requeue 17\n"


def test_tasks_are_stopped_by_a_signal_that_they_hear(tmp_path: Path) -> None:
    hears = "trap 'echo stopped in order; exit 0' TERM; echo up; while true; do sleep 0.1; done"
    done, folder = run_script(tmp_path, "sleep 1.5", hears, hears)
    assert done.returncode == 0, done.stdout
    for name in ("controller-0", *(f"server-{i}" for i in range(4))):
        assert (folder / "logs" / f"{name}.log").read_text().splitlines()[-1] == "stopped in order"


def test_deaf_tasks_are_killed_after_the_grace(tmp_path: Path) -> None:
    done, _ = run_script(tmp_path, "sleep 1", "trap '' TERM; sleep 60 & wait; sleep 60")
    assert done.returncode == 0, done.stdout


# The trainer's rank 5 plays the scheduler: it signals the batch script.
SIGNALS = 'if [ "$RANK" = 5 ]; then sleep 0.5; kill -%s "$BATCH"; fi; exec sleep 60'


@pytest.mark.parametrize("signal", ["USR1", "TERM"], ids=["time limit", "preemption with a grace time"])
def test_signals_of_a_running_job_stop_the_steps_and_requeue(tmp_path: Path, signal: str) -> None:
    done, _ = run_script(tmp_path, SIGNALS % signal)
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "calls").read_text() == "requeue 17\n"
    assert (tmp_path / "calls.scancel").read_text() == "--signal=TERM 17\n"


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING", "CANCELLED"])
def test_a_job_that_slurm_ends_or_requeues_is_not_requeued_once_more(tmp_path: Path, state: str) -> None:
    done, _ = run_script(tmp_path, SIGNALS % "TERM", state=state)
    assert done.returncode == 143, done.stderr
    assert f"The job is {state} and is not requeued by itself" in done.stdout
    assert not (tmp_path / "calls").exists()


def test_a_job_leaves_the_folder_of_another_one_alone(tmp_path: Path) -> None:
    def before(folder: Path) -> None:
        (folder / "job.id").write_text("16\n")
        (folder / "secret").write_text("of job 16")

    done, folder = run_script(tmp_path, "exit 0", before=before)
    assert done.returncode == 64
    assert "Slurm job 16 works in" in done.stdout
    assert (folder / "secret").read_text() == "of job 16"
    assert (folder / "job.id").read_text() == "16\n"


# ------------------------------------------------------------ submitting


def with_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    folder = tmp_path / "programs"
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_submitting_without_slurm_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = job(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentError_, match=r"sbatch is not on this machine .*job\.sbatch"):
        submit(config, plan, RunStart(config))
    assert (plan.run_folder.path / "job.sbatch").read_text() == sbatch_script(config, plan)
    assert (plan.run_folder.path / "config.json").is_file()


def test_the_job_is_submitted_before_the_folder_is_touched_and_begins_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = job(tmp_path)
    secret, calls = plan.run_folder.path / "secret", tmp_path / "calls"
    plan.run_folder.path.mkdir()
    secret.write_text("old")
    (plan.run_folder.path / "job.failures").write_text("3\n")
    see = f'echo "$0 $*: $(cat {secret})" >> {calls}'
    with_programs(tmp_path, monkeypatch, sbatch=f"{see}; cat > {tmp_path}/got; echo '42;cluster'", scontrol=see)
    assert submit(config, plan, RunStart(config)) == "42"
    assert (
        (tmp_path / "got").read_text()
        == (plan.run_folder.path / "job.sbatch").read_text()
        == sbatch_script(config, plan)
    )
    assert (plan.run_folder.path / "job.id").read_text() == "42\n"
    assert not (plan.run_folder.path / "job.failures").exists(), "who submits again begins to count again"
    first, second = calls.read_text().splitlines()
    assert first.endswith("sbatch --parsable --hold: old")
    assert second.endswith(f"scontrol release 42: {secret.read_text()}")


def test_a_refused_job_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = job(tmp_path)
    with_programs(tmp_path, monkeypatch, sbatch="echo 'invalid partition' >&2; exit 1")
    with pytest.raises(EnvironmentError_, match=r"sbatch refused .*: invalid partition"):
        submit(config, plan, RunStart(config))
    assert not plan.run_folder.path.exists()


def test_a_job_that_cannot_be_released_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = job(tmp_path)
    calls = tmp_path / "calls"
    with_programs(
        tmp_path,
        monkeypatch,
        sbatch="echo 42",
        scontrol="echo 'no controller' >&2; exit 1",
        scancel=f'echo "$@" > {calls}',
    )
    with pytest.raises(EnvironmentError_, match="scontrol refused the job: no controller"):
        submit(config, plan, RunStart(config))
    assert calls.read_text() == "42\n"


# ------------------------------------------------------------ a second start


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def entered(tmp_path: Path) -> Path:
    """Start beside job 17, whose folder has a secret and ports."""
    config, plan = job(tmp_path)
    if not plan.run_folder.path.exists():
        with RunStart(config) as folder:
            folder.prepare()
        (plan.run_folder.path / "job.id").write_text("17\n")
        (plan.run_folder.path / "rendezvous" / "trainer-0.json").write_text("{}")
    with RunStart(config):
        return plan.run_folder.path


@pytest.mark.parametrize("squeue", ["true", FORGOTTEN], ids=["over", "forgotten"])
def test_a_job_that_is_over_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str) -> None:
    with_programs(tmp_path, monkeypatch, squeue=squeue)
    assert (entered(tmp_path) / "job.id").is_file()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING"])
def test_a_second_start_is_refused_while_the_job_waits_or_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    with_programs(tmp_path, monkeypatch, squeue=f"echo {state}")
    with pytest.raises(ConfigError, match=r"Slurm job 17 works in .*my-run \(fix: wait for it, scancel 17"):
        entered(tmp_path)


@pytest.mark.parametrize(
    ("programs", "why"),
    [({}, "squeue is not on this machine"), ({"squeue": DOWN}, "Unable to contact slurm controller")],
    ids=["missing", "no controller"],
)
def test_a_job_of_unknown_state_may_be_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], why: str
) -> None:
    with_programs(tmp_path, monkeypatch, **programs)
    if not programs:
        monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=rf"job 17 may still work in .*{why}.*remove .*job\.id if the job is over"):
        entered(tmp_path)
    folder = tmp_path / "my-run"
    assert (folder / "rendezvous" / "trainer-0.json").is_file()
    (folder / "job.id").unlink()
    entered(tmp_path)


def test_tasks_are_told_the_names_of_all_nodes(tmp_path: Path) -> None:
    """They choose their address by the route to these."""
    lines = sbatch_script(*job(tmp_path)).splitlines()
    names = next(i for i, line in enumerate(lines) if line.startswith("mapfile -t NODES "))
    assert lines[names + 1] == 'export AREAL_LORA_NODES="${NODES[*]}"'

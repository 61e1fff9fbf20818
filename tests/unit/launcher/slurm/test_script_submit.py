"""Submitting a run, and starting it a second time, with stand-ins for Slurm's programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.families.registry import known_config
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm.script import sbatch_script, submit
from areal_lora.launcher.start import RunStart
from tests.support.paths import EXAMPLES

MOE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"


def job(folder: Path, *overrides: str) -> tuple[Config, JobPlan]:
    config = load_config([MOE], [f"run.root={folder}", "run.name=my-run", *overrides])
    return config, make_plan(config, Facts(hf_config=known_config(config.model.path)))


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
        submit(config, plan, RunStart(config).prepare)
    assert (plan.run_folder.path / "job.sbatch").read_text() == sbatch_script(config, plan)
    assert (plan.run_folder.path / "config.json").is_file()


def test_the_job_is_submitted_before_the_folder_is_touched_and_begins_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = job(tmp_path)
    secret, calls = plan.run_folder.path / "secret", tmp_path / "calls"
    plan.run_folder.path.mkdir()
    secret.write_text("old")
    (plan.run_folder.path / "job.requeues.json").write_text("{}")
    see = f'echo "$0 $*: $(cat {secret} 2>&1)" >> {calls}'
    with_programs(tmp_path, monkeypatch, sbatch=f"{see}; cat > {tmp_path}/got; echo '42;cluster'", scontrol=see)
    assert submit(config, plan, RunStart(config).prepare) == "42"
    assert (
        (tmp_path / "got").read_text()
        == (plan.run_folder.path / "job.sbatch").read_text()
        == sbatch_script(config, plan)
    )
    assert (plan.run_folder.path / "job.id").read_text() == "42\n"
    assert not (plan.run_folder.path / "job.requeues.json").exists(), "who submits again begins to count again"
    first, second = calls.read_text().splitlines()
    assert first.endswith("sbatch --parsable --hold: old")
    assert second.endswith("No such file or directory"), "the job makes its own secret"
    assert "scontrol release 42: " in second


def test_a_cluster_in_the_environment_is_refused_as_one_in_extra_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = job(tmp_path)
    with_programs(tmp_path, monkeypatch, sbatch=f"touch {tmp_path}/called; echo 42", scontrol="true")
    monkeypatch.setenv("SBATCH_CLUSTERS", "west")
    with pytest.raises(ConfigError, match=r"SBATCH_CLUSTERS: 'west' makes a job of another cluster.*unset it"):
        submit(config, plan, RunStart(config).prepare)
    assert not (tmp_path / "called").exists()
    assert not plan.run_folder.path.exists()
    monkeypatch.setenv("SBATCH_CLUSTERS", "")
    assert submit(config, plan, RunStart(config).prepare) == "42"


@pytest.mark.parametrize("inside", [True, False])
def test_a_job_has_no_options_of_the_allocation_that_it_is_submitted_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    config, plan = job(tmp_path)
    with_programs(tmp_path, monkeypatch, sbatch=f"cat > /dev/null; env > {tmp_path}/env; echo 42", scontrol="true")
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_CONF", *(["SLURM_JOB_ID"] if inside else [])):
        monkeypatch.setenv(name, "7")
    for name in ("SBATCH_SIGNAL", "SBATCH_NO_REQUEUE", "SBATCH_ACCOUNT"):  # the script's lines, and the user's own
        monkeypatch.setenv(name, "7")
    submit(config, plan, RunStart(config).prepare)
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    has = {name for name in names if name.startswith(("SLURM_", "SBATCH_"))} - {"SBATCH_ACCOUNT"}
    assert has == ({"SLURM_CONF"} if inside else {"SLURM_GPUS_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_CONF"})
    assert "SBATCH_ACCOUNT" in names


def test_a_refused_job_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = job(tmp_path)
    with_programs(tmp_path, monkeypatch, sbatch="echo 'invalid partition' >&2; exit 1")
    with pytest.raises(EnvironmentError_, match=r"sbatch refused .*: invalid partition"):
        submit(config, plan, RunStart(config).prepare)
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
    with pytest.raises(EnvironmentError_, match="scontrol release 42: no controller"):
        submit(config, plan, RunStart(config).prepare)
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
        folder.folder.session_name.write_text("17-0\n")
        (plan.run_folder.path / "sessions" / "17-0").mkdir(parents=True)
    with RunStart(config):
        return plan.run_folder.path


@pytest.mark.parametrize("said", ["echo JobId=17 JobState=COMPLETED", FORGOTTEN], ids=["over", "forgotten"])
def test_a_job_that_is_over_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    with_programs(tmp_path, monkeypatch, scontrol=said)
    assert (entered(tmp_path) / "job.id").is_file()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING"])
def test_a_second_start_is_refused_while_the_job_waits_or_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    with_programs(tmp_path, monkeypatch, scontrol=f"echo JobId=17 JobState={state}")
    with pytest.raises(ConfigError, match=r"Slurm job 17 works in .*my-run \(fix: wait for it, scancel 17"):
        entered(tmp_path)


@pytest.mark.parametrize(
    ("programs", "why"),
    [({}, "scontrol is not on this machine"), ({"scontrol": DOWN}, "Unable to contact slurm controller")],
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
    assert (folder / "sessions" / "17-0").is_dir()
    (folder / "job.id").unlink()
    entered(tmp_path)

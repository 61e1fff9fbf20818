"""The script of a job of spare servers, as text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.errors import ConfigError
from areal_lora.launcher.slurm.job_steps import SpareJob, spare_script
from areal_lora.run_folder.paths import RunFolder
from tests.support.paths import EXAMPLES

GPU = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"]


def script(*overrides: str, folder: str = "/shared/runs/my run", **job: object) -> list[str]:
    config = load_config(GPU, ["rollout.tp=2", *overrides])
    spare = SpareJob(**({"servers": 3, "grace_s": 20.0} | job))  # type: ignore[arg-type]
    text = spare_script(config, RunFolder(Path(folder), "12-0"), spare)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text.splitlines()


def test_a_job_has_one_node_with_devices_for_its_servers_and_is_not_requeued() -> None:
    lines = script("cluster.slurm.partition=big", "cluster.slurm.extra=[--qos=low]", "cluster.slurm.gres_type=h100")
    assert {
        "#SBATCH --nodes=1",
        "#SBATCH --gres=gpu:h100:6",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --partition=big",
        "#SBATCH --qos=low",
        "#SBATCH --no-requeue",
        "#SBATCH --signal=B:TERM@90",
    } <= set(lines)
    assert '#SBATCH --output="/shared/runs/my run/logs/servers-%j.log"' in lines
    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith("-m areal_lora add-servers '/shared/runs/my run' --here --servers 3 --grace-s 20")


def test_setup_is_guarded_as_in_a_run_and_may_read_unset_variables(tmp_path: Path) -> None:
    for setup, code in (('[ -z "$UNSET_HERE" ]', 0), ("false", 69)):
        lines = script(f"cluster.slurm.setup=[{json.dumps(setup)}]")
        run = [*(line for line in lines[:-1] if "scontrol" not in line), "echo started"]
        done = subprocess.run(["bash"], input="\n".join(run), capture_output=True, text=True, check=False)
        assert (done.returncode, "started" in done.stdout) == (code, not code), done
        assert ("false ended with code 1" in done.stdout) is bool(code)


def test_time_and_partition_of_the_command_win() -> None:
    lines = script("cluster.slurm.partition=big", time_limit="00:30:00", partition="idle")
    assert "#SBATCH --time=00:30:00" in lines
    assert "#SBATCH --partition=idle" in lines
    assert not any("big" in line for line in lines)


def test_without_devices_there_is_no_gres() -> None:
    assert not any("--gres" in line for line in script("cluster.device=cpu"))


def test_nodes_are_like_those_of_the_runs_servers() -> None:
    """Of their component where the job is heterogeneous, what it leaves unset of the job, an empty text of neither."""
    job = ("cluster.slurm.mem=800G", "cluster.slurm.partition=big", "cluster.slurm.extra=[--account=me]")
    assert {"#SBATCH --mem=800G", "#SBATCH --partition=big"} <= set(script(*job))
    parts = "{roles: [trainer, controller], nodes: 2, gres_type: h100, extra: [--constraint=ib]}, "
    parts += "{roles: [rollout], partition: infer, gres_type: l40s, mem: 400G, extra: [--licenses=x]}"
    lines = script(*job, "cluster.nodes=1", f"cluster.slurm.components=[{parts}]")
    at = ["--partition=infer", "--gres=gpu:l40s:6", "--mem=400G", "--account=me", "--licenses=x"]
    assert [line for line in at if f"#SBATCH {line}" not in lines] == []
    assert not any("--constraint" in line for line in lines)
    parts = parts.replace("mem: 400G, ", "").replace("infer", "''")
    lines = script(*job, "cluster.nodes=1", f"cluster.slurm.components=[{parts}]")
    assert "#SBATCH --mem=800G" in lines
    assert not any("--partition" in line for line in lines)


def test_a_container_that_srun_would_start_is_refused_and_one_of_a_wrapper_is_not() -> None:
    image = "cluster.slurm.srun_extra.rollout=[--container-image=x]"
    with pytest.raises(ConfigError, match=r"srun_extra.rollout: .*fix: set cluster.slurm.wrapper.rollout.* --here"):
        script(image)
    assert script(image, "cluster.slurm.wrapper.rollout=[apptainer, exec, x]")
    assert script("cluster.slurm.srun_extra.trainer=[--container-image=x]")
    assert script("cluster.slurm.srun_extra.rollout=[--cpu-bind=none]")

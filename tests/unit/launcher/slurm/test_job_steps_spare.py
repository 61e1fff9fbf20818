"""The script of a job of spare servers, as text."""

from __future__ import annotations

import subprocess
from pathlib import Path

from areal_lora.config.load import load_config
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


def test_time_and_partition_of_the_command_win() -> None:
    lines = script("cluster.slurm.partition=big", time_limit="00:30:00", partition="idle")
    assert "#SBATCH --time=00:30:00" in lines
    assert "#SBATCH --partition=idle" in lines
    assert not any("big" in line for line in lines)


def test_without_devices_there_is_no_gres() -> None:
    assert not any("--gres" in line for line in script("cluster.device=cpu"))

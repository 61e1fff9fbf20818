"""Jobs of every kind that the planner knows: files and overrides."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.families.registry import known_config
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm.script import sbatch_script
from tests.support.paths import EXAMPLES

MOE = "gsm8k_grpo_megatron_lora_moe"
SLURM = ("cluster.slurm.partition=gpu", "cluster.slurm.time_limit=08:00:00")
COMPONENTS = (
    "cluster.slurm.components=[{roles: [trainer], nodes: 2, gres_type: h100, extra: [--constraint=h100]}, "
    "{roles: [rollout], nodes: 2, devices_per_node: 4, gres_type: l40s, extra: [--constraint=l40s]}, "
    "{roles: [controller], partition: cpu, mem: 16G}]"
)
JOBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "laptop": ((MOE, "embedded"), ()),
    "one_gpu": (("one_gpu",), ()),
    "one_node": (("gsm8k_grpo_megatron_lora_moe_one_node",), (*SLURM, "cluster.kind=slurm")),
    "three_nodes": ((MOE,), (*SLURM, "cluster.slurm.extra=[--exclusive]", "cluster.slurm.gres_type=h100")),
    "eight_nodes": (
        ("gsm8k_grpo_megatron_lora_72b",),
        (*SLURM, "cluster.nodes=8", "trainer.world_size=32", "rollout.servers=4", "cluster.slurm.mem=1500G"),
    ),
    "hetjob": ((MOE,), (*SLURM, "cluster.nodes=1", "cluster.slurm.mem=800G", COMPONENTS)),
    "containers": (
        (MOE,),
        (
            *SLURM,
            "run.root=/shared/my runs",
            "cluster.slurm.srun_extra.rollout=[--container-image=/images/vllm 0.33.sqsh, "
            "'--container-mounts=/shared:/shared']",
            "rollout.python=/usr/bin/python3",
            "cluster.slurm.wrapper.trainer=[apptainer, exec, --nv, --bind, /shared, /images/megatron.sif]",
            "trainer.python=python3",
            "cluster.controller_python=/envs/controller/bin/python",
        ),
    ),
}


def job(name: str, root: str = "/shared/runs") -> tuple[Config, JobPlan]:
    """A configuration and its plan, without regard to this machine."""
    files, overrides = JOBS[name]
    config = load_config([EXAMPLES / f"{file}.yaml" for file in files], [f"run.root={root}", *overrides])
    folder = Path(config.model.path)
    hf = json.loads((folder / "config.json").read_text()) if folder.is_dir() else known_config(config.model.path)
    return config, make_plan(config, Facts(hf_config=hf))


def as_text(name: str) -> str:
    """The plan, and the batch script of a Slurm job, with this machine's paths replaced."""
    config, plan = job(name)
    lines = [
        f"{p.name}: nodes {p.first_node}-{p.first_node + p.nodes - 1}, {p.devices_per_node} devices" for p in plan.pools
    ]
    for spec in plan.processes:
        env = " ".join(f"{key}={value}" for key, value in sorted(spec.env.items()))
        devices = ",".join(map(str, spec.devices))
        lines.append(
            f"{spec.name}: node {spec.node} devices [{devices}] cpus {spec.cpus} env {env}: {' '.join(spec.argv)}"
        )
    if config.cluster.kind == "slurm":
        lines += ["", sbatch_script(config, plan)]
    text = "\n".join(lines) + "\n"
    for path, name in ((sys.executable, "/env/bin/python"), (str(Path.cwd()), "/work")):
        text = text.replace(shlex.quote(path), name).replace(path, name)
    return text

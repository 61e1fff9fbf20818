"""The ``#SBATCH`` lines of a job and the srun options of its roles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.families.registry import known_config
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm.script import directives, quoted, sbatch_script, step_options
from tests.support.paths import EXAMPLES

MOE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
HETJOB = (
    "cluster.nodes=1",
    "cluster.slurm.components=[{roles: [trainer], nodes: 2, gres_type: h100, extra: [--constraint=ib]}, "
    "{roles: [rollout], nodes: 2, devices_per_node: 4, gres_type: l40s, partition: small, extra: [--licenses=x]}, "
    "{roles: [controller], partition: cpu, mem: 16G}]",
    "cluster.slurm.mem=800G",
    "cluster.slurm.extra=[--wckey=w, --account=me]",
)


def job(*overrides: str) -> tuple[Config, JobPlan]:
    config = load_config([MOE], ["run.root=/r", "run.name=my-run", *overrides])
    return config, make_plan(config, Facts(hf_config=known_config(config.model.path)))


def blocks(*overrides: str) -> list[list[str]]:
    """Options of each component."""
    text = "\n".join(directives(*job(*overrides)))
    return [re.findall(r"^#SBATCH (--.*)$", block, flags=re.M) for block in text.split("#SBATCH hetjob")]


def test_nodes_of_workers_have_a_task() -> None:
    """The controller starts the workers as steps; the plan has no process there."""
    of_workers = HETJOB[1].removesuffix("]") + ", {roles: [environment], nodes: 3, partition: cpu, mem: '0'}]"
    *_, options = blocks(HETJOB[0], of_workers, *HETJOB[2:])
    assert options[:3] == ["--nodes=3", "--ntasks-per-node=1", "--mincpus=1"]
    assert not any(option.startswith("--gres") for option in options)


def test_every_option_of_a_submission() -> None:
    keys = {
        "partition": "gpu,big",
        "time_limit": "1-12:00:00",
        "mem": "800G",
        "gres_type": "h100",
        "extra": "[--account=me, --licenses=a:1, '--constraint=\"h100&ib\"']",
    }
    (options,) = blocks(*(f"cluster.slurm.{key}={value}" for key, value in keys.items()))
    assert options == [
        "--job-name=my-run",
        "--output=/r/my-run/logs/job-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@60",
        "--nodes=3",
        "--ntasks-per-node=9",
        "--mincpus=66",
        "--gres=gpu:h100:8",
        "--mem=800G",
        "--time=1-12:00:00",
        "--partition=gpu,big",
        "--no-kill",
        "--account=me",
        "--licenses=a:1",
        '--constraint="h100&ib"',
    ]


def test_a_component_asks_for_its_own_nodes() -> None:
    trainer, rollout, controller = blocks(*HETJOB)
    shared = {"--time=24:00:00", "--no-kill"}
    for options in (trainer, rollout, controller):
        assert shared <= set(options)
    assert {"--nodes=2", "--ntasks-per-node=8", "--mincpus=64", "--gres=gpu:h100:8", "--mem=800G"} <= set(trainer)
    assert {"--constraint=ib", "--wckey=w", "--account=me", "--job-name=my-run", "--requeue"} <= set(trainer)
    assert {"--nodes=2", "--ntasks-per-node=2", "--gres=gpu:l40s:4", "--partition=small"} <= set(rollout)
    assert {"--mem=800G", "--licenses=x"} <= set(rollout)
    assert {"--nodes=1", "--ntasks-per-node=1", "--mincpus=2", "--partition=cpu", "--mem=16G"} <= set(controller)
    assert not [option for option in controller if option.startswith(("--gres", "--constraint", "--job-name"))]


def test_a_server_has_cpus_for_its_engine_and_planes() -> None:
    config, plan = job()
    assert step_options(config, plan, "server") == ["--mem=0", "--cpu-bind=none", "--gpu-bind=none"]
    assert {role: {spec.cpus for spec in plan.role(role)} for role in ("server", "trainer", "controller")} == {
        "server": {4},
        "trainer": {8},
        "controller": {2},
    }


def test_options_of_a_step_in_their_component() -> None:
    extra = "cluster.slurm.srun_extra.rollout=[--container-image=a b.sqsh, '--container-mounts=/r:/r']"
    config, plan = job(*HETJOB, extra, "cluster.slurm.srun_extra.controller=[--cpu-bind=cores]")
    assert step_options(config, plan, "server") == [
        "--het-group=1",
        "--mem=0",
        "--cpu-bind=none",
        "--gpu-bind=none",
        "--container-image=a b.sqsh",
        "--container-mounts=/r:/r",
    ]
    words = step_options(config, plan, "controller")
    assert (words[0], words[-1]) == ("--het-group=2", "--cpu-bind=cores"), "the last one counts"
    assert "'--container-image=a b.sqsh'" in sbatch_script(config, plan)


def test_a_wrapper_stands_before_the_interpreter_of_its_role() -> None:
    wrapped = ["cluster.slurm.wrapper.trainer=[apptainer, exec, --nv, /i/my image.sif]", "trainer.python=python3"]
    _, plan = job(*wrapped, "cluster.controller_python=/c/python")
    assert plan.role("trainer")[0].argv[:6] == ("apptainer", "exec", "--nv", "/i/my image.sif", "python3", "-m")
    assert plan.role("controller")[0].argv[0] == "/c/python"
    _, local = job(*wrapped, "cluster.kind=local", "cluster.bind=127.0.0.1")
    assert local.role("trainer")[0].argv[0] == "python3"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/r/run-1/logs", "/r/run-1/logs"),
        ("/my runs/x", '"/my runs/x"'),
        ('a"b\\c', '"a\\"b\\\\c"'),
        ("it's #1", '"it\'s #1"'),
    ],
)
def test_quoting(text: str, line: str) -> None:
    assert quoted(text) == line


def test_a_percent_sign_in_a_path_is_no_replacement(tmp_path: Path) -> None:
    (options,) = blocks("run.root=/100%j of us")
    assert '--output="/100%%j of us/my-run/logs/job-%j.log"' in options

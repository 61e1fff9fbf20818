"""The doctor inside an allocation of a real Slurm: every node answers for itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.cli.command import COMMAND
from tests.support.launcher.command import configs
from tests.support.launcher.real_slurm import Slurm
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_node_of_the_allocation_is_examined(slurm: Slurm, tmp_path: Path) -> None:
    example = configs("gsm8k_grpo_megatron_lora_moe", "embedded")
    doctor = [*COMMAND, "doctor", *example, f"run.root={tmp_path}", "--quick", "--json"]
    done = subprocess.run(
        ["salloc", "--quiet", "--nodes=3", *doctor],
        cwd=ROOT,
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {one["path"] for one in report["findings"] if one["check"] == "clock"} == {"n1", "n2", "n3"}
    assert "looking at 3 nodes of the allocation" in done.stderr
    assert list(tmp_path.iterdir()) == []

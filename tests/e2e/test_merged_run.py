"""The embedded example with merged rollouts: a server that dies while it writes a version, and a resume.

Sampling is truncated, which no record, score or audit may show.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.weight_sync.manifest import base_digest
from tests.support.launcher.command import configs, forked_run
from tests.support.paths import TINY_MODEL

STEPS, MORE = 2, 1
WEIGHTS = 12  # fused weights of a version of the tiny model
SECOND_VERSION = f"server.weight_written:{WEIGHTS + 5}:kill"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]


def launch(root: Path, steps: int, **env: str) -> str:
    root.mkdir(exist_ok=True)
    command = forked_run(
        root,
        *configs("merged"),
        f"run.root={root}",
        "run.name=merged",
        f"run.steps={steps}",
        "eval.every_steps=0",
        "adapters.gsm8k.sampling.prompts_per_step=8",
        "adapters.gsm8k.sampling.top_p=0.9",
        "adapters.gsm8k.sampling.top_k=20",
        "adapters.gsm8k.task.n_eval=16",
        "weight_sync.timeout_s=75",
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=os.environ | env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_merged_run_survives_a_half_written_server_and_goes_on(tmp_path: Path) -> None:
    before, root, marks = base_digest(TINY_MODEL), tmp_path / "runs with a space", tmp_path / "marks"
    marks.mkdir()
    launch(root, STEPS, AREAL_LORA_FAULT=f"once={marks}:{SECOND_VERSION}")
    assert [mark.name for mark in marks.iterdir()] == ["server.weight_written"], "the server was killed"
    resumed = launch(root, STEPS + MORE)
    assert f"{STEPS + MORE} steps in" in resumed

    metrics: Any = read_metrics(root / "merged")
    publishes = {record.version: record for record in metrics.publishes}
    assert sorted(publishes) == list(range(STEPS + MORE + 1))
    for version, record in publishes.items():
        assert record.probe_mean_abs is not None
        assert record.probe_mean_abs < 1e-4, "trainer and server agree on every version, also after a restart"
        assert record.merge_survives == pytest.approx(1.0, abs=1e-3)
        assert record.differs_from_base or version == 0
    [lost] = [record for record in publishes.values() if record.lost]
    assert lost.version == 1, "the version whose writing was cut off was written whole by the next server"
    assert base_digest(TINY_MODEL) == before
    assert len(metrics.steps) == STEPS + MORE
    for tag in ("train/mismatch_fresh", "train/audit_gap"):
        found = [value for record in metrics.steps if (value := record.metrics.get(tag)) is not None]
        assert found, tag
        assert max(found) < 1e-4, tag

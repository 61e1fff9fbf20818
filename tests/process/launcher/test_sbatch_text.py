"""A real slurmctld with pretended GPU nodes accepts the batch script of every job: ``sbatch --test-only``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_lora.launcher.slurm.script import sbatch_script
from tests.support.launcher import real_slurm
from tests.support.launcher.jobs import JOBS, job
from tests.support.launcher.real_slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SLURM_JOBS = [name for name in JOBS if name != "laptop"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if reason := real_slurm.why_not():
        pytest.skip(reason)
    with real_slurm.pretended() as cluster:
        yield cluster


def answer(slurm: Slurm, folder: Path, name: str, change: tuple[str, str] = ("", "")) -> str:
    script = folder / "my job.sbatch"
    text = sbatch_script(*job(name))
    assert change[0] in text
    script.write_text(text.replace(*change) if change[0] else text)
    while True:
        real_slurm.refreshed(slurm)
        said = slurm.outcome("sbatch", "--test-only", str(script))
        if real_slurm.idle(slurm):  # still
            return said


@pytest.mark.parametrize("name", SLURM_JOBS)
def test_slurm_accepts(slurm: Slurm, tmp_path: Path, name: str) -> None:
    _, plan = job(name)
    said = answer(slurm, tmp_path, name)
    assert "to start at" in said, said
    if len(plan.pools) > 1:
        assert "on c1,h[1-2],l[1-2]" in said


def test_slurm_refuses_gpus_that_no_node_has(slurm: Slurm, tmp_path: Path) -> None:
    assert "to start at" not in answer(slurm, tmp_path, "three_nodes", ("gpu:h100:8", "gpu:b300:8"))

"""Faults of adapters that have joined a running run, and the one beside them has the numbers of a run alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.e2e.desired_run import Service, wanted
from tests.support.e2e.several_adapters import Ended, entries
from tests.support.sizes import NIGHTLY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounts need privileges",
)
HANGS = """
import time

def reward(completion, answer):
    time.sleep(3600)
"""


@pytest.mark.skipif(not NIGHTLY, reason="takes minutes; make test-all")
@needs_mounts
def test_a_scorer_that_hangs_and_a_full_disk_end_their_adapters(alone: Ended, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    [attention, shared] = entries("attention", "shared")
    reward = {"kind": "function", "path": f"{tmp_path / 'hangs.py'}:reward", "workers": 8, "timeout_s": 0.2}
    sampling = {"prompts_per_step": 16, "n_samples": 2, "max_new_tokens": 16}  # groups wait for retries together
    service = Service(tmp_path, "faulty", [attention], small_disk="full.1")
    try:
        service.wait((service.folder.path / "mounted").exists, "the small disk")
        service.want(
            wanted(shared | {"reward": reward, "sampling": sampling}, "hangs"), wanted(shared, "full"), closed=True
        )
        service.wait_state("full.1", "failed")
        service.wait_state("hangs.1", "failed")
        faulty = service.end()
    finally:
        service.process.terminate()
        service.process.wait(150)
    assert faulty.code not in (0, 1), faulty.output
    assert "could not be written" in service.states("full.1")[-1][1]
    assert "timeout" in service.states("hangs.1")[-1][1]
    assert service.states("attention")[-1][0] == "done"
    assert faulty.states["attention"] == alone.states["attention"]

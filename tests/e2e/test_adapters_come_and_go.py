"""Adapters join, pause and leave a running run, and the one beside them has the numbers of a run alone. Real server."""

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


def test_an_adapter_has_its_own_numbers_whoever_comes_and_goes(alone: Ended, tmp_path: Path) -> None:
    """Weights and both moments of all steps, bit for bit; one joins at step 2 and is deleted at step 4.

    The run begins without adapters. A name that is used again, an adapter that cannot be trained, and one more than
    servers hold, change nothing either.
    """
    [attention, experts, shared] = entries(
        "attention", "experts", "shared", experts={"steps": 50}, shared={"steps": 50}
    )
    first = wanted(attention)
    bad = experts | {"rank": 64}
    service = Service(tmp_path, "visited", [])
    try:
        service.wait(service.folder.config.exists, "the run folder")
        service.want(first, wanted(shared))
        service.wait(lambda: 1 in service.steps("attention.1"), "step 2")
        late = [wanted(shared, name) for name in ("late", "later")]  # the first has a place if the test is slow
        service.want(first, wanted(shared), wanted(bad, "bad"), wanted(experts), *late)
        service.wait_state("experts.1", "active")
        service.wait_state("bad.1", "failed")
        service.wait_state("later.1", "pending")
        service.wait(lambda: 3 in service.steps("attention.1") and service.steps("experts.1") != [], "step 4")
        service.want(
            first, wanted(shared), wanted(experts, phase="deleted"), wanted(experts | {"steps": 2}, incarnation=2)
        )
        service.wait_state("experts.1", "deleted")
        service.wait_state("experts.2", "active")
        gone = wanted(shared, phase="deleted")
        service.want(first, gone, wanted(experts | {"steps": 2}, incarnation=2), closed=True)
        visited = service.end()
    finally:
        service.process.terminate()
        service.process.wait(150)
    assert visited.code == 0, visited.output
    assert [state for state, _ in service.states("experts.2")] == ["pending", "active", "draining", "done"]
    [(state, reason)] = service.states("bad.1")
    assert (state, "rank: rank 64 is above the servers' rollout.max_lora_rank = 8" in reason) == ("failed", True)
    assert "rollout.max_adapters = 3" in service.states("later.1")[0][1]
    assert service.steps("experts.2") == [0, 1], "a name that is used again begins anew"
    for version in (0, 1):
        assert visited.states["experts.2"][version] == visited.states["experts.1"][version], "as its seed has it begin"
    assert (service.folder.adapter_export("experts.2") / "adapter_model.safetensors").exists()
    assert alone.states["attention"] == visited.states["attention.1"]


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

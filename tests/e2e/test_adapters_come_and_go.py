"""Adapters join, pause and leave a running run, and the one beside them has the numbers of a run alone. Real server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_lora.run_folder.desired import Desired, DesiredAdapter, DesiredPhase, write_desired
from areal_lora.run_folder.paths import RunFolder
from tests.support.e2e.metrics import records
from tests.support.e2e.several_adapters import REPEATABLE, Ended, entries, run, states_of
from tests.support.paths import EXAMPLES, ROOT
from tests.support.sizes import NIGHTLY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounts need privileges",
)
WAIT_S = 300.0
ON_A_SMALL_DISK = """
run="$0"; "$@" & launcher=$!
trap 'kill $launcher' TERM
while [ ! -e "$run/config.json" ]; do sleep 0.1; done
mkdir -p "$run/checkpoints/{0}" && mount -t tmpfs -o size=64k tmpfs "$run/checkpoints/{0}" && touch "$run/mounted"
wait $launcher
"""
HANGS = """
import time

def reward(completion, answer):
    time.sleep(3600)
"""


class Service:
    """A run with a service, and the desired state that it follows."""

    def __init__(self, root: Path, name: str, configured: list[dict[str, Any]], small_disk: str = "") -> None:
        """Checkpoints of ``small_disk`` are on a disk of 64 KiB."""
        base = yaml.safe_load((EXAMPLES / "three_adapters.yaml").read_text())
        base["model"]["path"] = str(EXAMPLES / "tiny_model")
        base["rollout"]["max_adapters"] = 3
        base |= {"adapters": configured, "service": {}}
        base["run"] = {"name": name, "root": str(root), "steps": 10, "seed": 1}
        (root / f"{name}.yaml").write_text(json.dumps(base))
        self.folder = RunFolder(root / name)
        self._output = (root / f"{name}.out").open("w+")
        self._generation = 0
        command = [sys.executable, "-m", "areal_lora.launch", "--config", str(root / f"{name}.yaml"), *REPEATABLE]
        if small_disk:
            command = ["unshare", "-m", "sh", "-c", ON_A_SMALL_DISK.format(small_disk), str(self.folder), *command]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def want(self, *adapters: DesiredAdapter, closed: bool = False) -> None:
        self._generation += 1
        write_desired(self.folder, Desired(generation=self._generation, adapters=adapters, closed=closed))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, f"ended while waiting for {what}\n{self.output}"
            assert time.monotonic() < deadline, f"{what}\n{self.output}"
            time.sleep(0.05)

    def steps(self, key: str) -> list[int]:
        found = records(self.folder.path) if self.folder.metrics.exists() else []
        return [record["step"] for record in found if record["kind"] == "step" and record["adapter"] == key]

    def states(self, key: str) -> list[tuple[str, str]]:
        found = records(self.folder.path) if self.folder.metrics.exists() else []
        mine = [record for record in found if record["kind"] == "state" and record["adapter"] == key]
        return [(record["state"], record["reason"]) for record in mine]

    def wait_state(self, key: str, state: str) -> None:
        self.wait(lambda: state in [found for found, _ in self.states(key)], f"{key} to be {state}")

    def end(self) -> Ended:
        code = self.process.wait(WAIT_S)
        names = [path.name for path in self.folder.checkpoints.iterdir()]
        return Ended(code, self.output, self.folder, states_of(self.folder, names))


def wanted(entry: dict[str, Any], name: str = "", incarnation: int = 1, phase: str = "active") -> DesiredAdapter:
    section = {key: value for key, value in entry.items() if key != "name"}
    return DesiredAdapter(
        name=name or entry["name"], incarnation=incarnation, phase=DesiredPhase(phase), adapter=section
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = run(tmp_path_factory.mktemp("alone"), "alone", entries("attention"))
    assert ended.code == 0, ended.output
    assert len(ended.states["attention"]) == 11
    return ended


def test_an_adapter_has_its_own_numbers_whoever_comes_and_goes(alone: Ended, tmp_path: Path) -> None:
    """Weights and both moments of all ten steps, bit for bit; one joins at step 3 and is deleted at step 6.

    The run begins without adapters. A name that is used again, an adapter that cannot be trained, and one more than
    servers hold, change nothing either.
    """
    [attention, experts, shared] = entries("attention", "experts", "shared", experts={"steps": 50})
    first = wanted(attention)
    bad = experts | {"rank": 64}
    service = Service(tmp_path, "visited", [])
    try:
        service.wait(service.folder.config.exists, "the run folder")
        service.want(first, wanted(shared))
        service.wait(lambda: 2 in service.steps("attention.1"), "step 3")
        service.want(first, wanted(shared), wanted(bad, "bad"), wanted(experts), wanted(shared, "late"))
        service.wait_state("experts.1", "active")
        service.wait_state("bad.1", "failed")
        service.wait_state("late.1", "pending")
        service.wait(lambda: 5 in service.steps("attention.1") and service.steps("experts.1") != [], "step 6")
        service.want(
            first, wanted(shared), wanted(experts, phase="deleted"), wanted(experts | {"steps": 2}, incarnation=2)
        )
        service.wait_state("experts.1", "deleted")
        service.wait_state("experts.2", "active")
        service.want(first, wanted(shared), wanted(experts | {"steps": 2}, incarnation=2), closed=True)
        visited = service.end()
    finally:
        service.process.terminate()
        service.process.wait(60)
    assert visited.code == 0, visited.output
    assert [state for state, _ in service.states("experts.2")] == ["pending", "active", "draining", "done"]
    [(state, reason)] = service.states("bad.1")
    assert (state, "rank: rank 64 is above the servers' rollout.max_lora_rank = 8" in reason) == ("failed", True)
    assert "rollout.max_adapters = 3" in service.states("late.1")[0][1]
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
        service.process.wait(60)
    assert faulty.code not in (0, 1), faulty.output
    assert "could not be written" in service.states("full.1")[-1][1]
    assert "timeout" in service.states("hangs.1")[-1][1]
    assert service.states("attention")[-1][0] == "done"
    assert faulty.states["attention"] == alone.states["attention"]

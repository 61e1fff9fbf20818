"""The embedded run on three nodes without Slurm, which are processes of this machine: ranks on two, the server on the
third. The agents of two are killed and started again; then the run is stopped.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint
from tests.support.cli.command import areal_lora
from tests.support.clocks import wait_until
from tests.support.e2e.metrics import records
from tests.support.launcher.command import forked_run
from tests.support.launcher.stops import marked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG_S = 600.0


class Nodes:
    """The same command on each node."""

    def __init__(self, root: Path) -> None:
        self.folder, self.root = root / "spread", root
        own = ["run.steps=400", "run.max_restarts=9", "cluster.nodes=3", "cluster.devices_per_node=1"]
        place = [f"run.root={root}", "run.name=spread", "cluster.kind=nodes", "cluster.bind=0.0.0.0"]
        self._command = forked_run(root, *place, *own)
        self.nodes = {node: self.start(str(node)) for node in range(3)}

    def start(self, node: str) -> subprocess.Popen[bytes]:
        mark = {"AREAL_LORA_TEST": f"{self.root} {node}"}
        with (self.root / f"node-{node}.out").open("ab") as output:
            environment = os.environ | mark | {"AREAL_LORA_NODE_RANK": node}
            return subprocess.Popen(self._command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def said(self, node: str) -> str:
        return (self.root / f"node-{node}.out").read_text()

    def on(self, node: int) -> set[str]:
        """Roles of the processes on a node."""
        words = [" ".join(process.cmdline()) for process in marked({"AREAL_LORA_TEST": f"{self.root} {node}"})]
        roles = {"trainer": "trainer.main", "server": "server.main", "controller": "rollout.main"}
        return {role for role, module in roles.items() if any(module in each for each in words)}

    def steps(self) -> int:
        return max((record["step"] for record in records(self.folder) if record["kind"] == "step"), default=-1)

    def more_steps(self, n: int) -> None:
        wanted = self.steps() + n
        wait_until(lambda: self.steps() >= wanted or self.nodes[0].poll() is not None, LONG_S, f"step {wanted}")
        assert self.nodes[0].poll() is None, self.said("0")


def test_a_run_on_three_nodes_survives_its_agents_and_stops_with_one_code(tmp_path: Path) -> None:
    run = Nodes(tmp_path)
    try:
        wrong = run.start("3")
        assert wrong.wait(LONG_S) == 64
        assert "AREAL_LORA_NODE_RANK: '3' is no rank among cluster.nodes = 3" in run.said("3")
        run.more_steps(2)
        assert [run.on(node) for node in range(3)] == [{"trainer", "controller"}, {"trainer"}, {"server"}]
        folder = RunFolder.current(run.folder)
        endpoint = read_endpoint(folder, "server", 0)
        assert endpoint is not None
        assert not endpoint.host.startswith("127.")
        for node in (1, 2):
            run.nodes[node].kill()
        wait_until(lambda: len(re.findall("is lost: the command there", run.said("0"))) == 2)
        before = run.steps()
        for node in (1, 2):
            run.nodes[node] = run.start(str(node))
        run.more_steps(2)
        assert [run.on(node) for node in range(3)] == [{"trainer", "controller"}, {"trainer"}, {"server"}]
        assert RunFolder.current(run.folder) == folder, "the same session"
        steps = [record["step"] for record in records(run.folder) if record["kind"] == "step"]
        assert sorted(set(steps)) == list(range(max(steps) + 1)), "none is left out"
        assert max(steps) > before
        status = areal_lora("status", run.folder)
        assert "running" in status.stdout
        assert areal_lora("stop", run.folder, timeout_s=LONG_S).returncode == 0
        assert [process.wait(LONG_S) for process in run.nodes.values()] == [130] * 3, run.said("0")
        assert all(run.on(node) == set() for node in range(3))
    finally:
        for process in run.nodes.values():
            process.kill()
            process.wait()

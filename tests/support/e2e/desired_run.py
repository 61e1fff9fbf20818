"""A run that begins without adapters and follows a desired state, which a test writes. Real processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from areal_lora.run_folder.paths import DesiredAdapter, DesiredAdapters, DesiredPhase, RunFolder, write_desired
from tests.support.cli.command import forked_python
from tests.support.e2e.metrics import records
from tests.support.e2e.several_adapters import REPEATABLE, SEED, Ended, states_of
from tests.support.launcher.command import forked_roles
from tests.support.paths import EXAMPLES, ROOT

WAIT_S = 300.0
ON_A_SMALL_DISK = """
run="$0"; "$@" & launcher=$!
trap 'kill $launcher' TERM
while [ ! -e "$run/config.json" ]; do sleep 0.1; done
mkdir -p "$run/checkpoints/{0}" && mount -t tmpfs -o size=64k tmpfs "$run/checkpoints/{0}" && touch "$run/mounted"
wait $launcher
"""


class Service:
    """A run with a service, and the desired state that it follows."""

    def __init__(
        self, root: Path, name: str, configured: list[dict[str, Any]], small_disk: str = "", overrides: str = ""
    ) -> None:
        """Checkpoints of ``small_disk`` are on a disk of 64 KiB. ``overrides`` are separated by spaces."""
        base = yaml.safe_load((EXAMPLES / "three_adapters.yaml").read_text())
        base["model"]["path"] = str(EXAMPLES / "tiny_model")
        base["rollout"]["max_adapters"] = 3
        base |= {"adapters": configured, "service": {}}
        base["run"] = {"name": name, "root": str(root), "steps": 10, "seed": SEED}
        (root / f"{name}.yaml").write_text(json.dumps(base))
        self.folder = RunFolder(root / name)
        self._output = (root / f"{name}.out").open("w+")
        self._generation = 0
        command = [forked_python(), "-m", "areal_lora.launch", "--config", str(root / f"{name}.yaml"), *REPEATABLE]
        command += [*overrides.split(), *forked_roles(root)]
        if small_disk:
            command = ["unshare", "-m", "sh", "-c", ON_A_SMALL_DISK.format(small_disk), str(self.folder), *command]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def want(self, *adapters: DesiredAdapter, closed: bool = False) -> None:
        self._generation += 1
        write_desired(self.folder, DesiredAdapters(generation=self._generation, adapters=adapters, closed=closed))

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

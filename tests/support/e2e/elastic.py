"""A run of the embedded example with servers that come and go: start it, add servers, remove them, read what it saw."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from rich.console import Console

from areal_lora.launcher.spares import remove_servers
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import RunMetrics
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_files, read_endpoint
from tests.support.cli.command import forked_python
from tests.support.e2e import lenient_trainer
from tests.support.engine.vllm_ext import stand_in
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES, embedded_run, forked_roles
from tests.support.launcher.stops import marked
from tests.support.paths import ROOT

START_S = 180.0


class ElasticRun:
    """A launched run, and the commands that added servers to it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
        self.folder, self.process, self.environment = folder, process, environment
        self.added: list[subprocess.Popen[bytes]] = []
        self.run_folder = RunFolder(folder, "")

    @property
    def metrics(self) -> RunMetrics:
        return read_metrics(self.run_folder)

    def servers(self) -> set[int]:
        return set(published_files(self.run_folder, "server"))

    def add(self, servers: int, grace_s: float = 20.0) -> subprocess.Popen[bytes]:
        command = [forked_python(), "-m", "areal_lora", "add-servers", str(self.folder)]
        command += ["--servers", str(servers), "--grace-s", f"{grace_s:g}"]
        with (self.folder.parent / f"added-{len(self.added)}.out").open("wb") as output:
            process = subprocess.Popen(
                command, env=os.environ | self.environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
        self.added.append(process)
        return process

    def remove_all(self) -> int:
        return remove_servers(self.run_folder, console=Console(file=(self.folder.parent / "removed").open("a")))

    def leave(self, index: int) -> None:
        endpoint = read_endpoint(self.run_folder, "server", index)
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGTERM)

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> float:
        began = time.monotonic()
        while not condition():
            assert self.process.poll() is None, f"the run ended while {what} was awaited\n{self.said()}"
            assert time.monotonic() - began < timeout_s, f"{what} did not happen in {timeout_s:g} s\n{self.said()}"
            time.sleep(0.1)
        return time.monotonic() - began

    def wait_steps(self, n: int) -> None:
        """Wait for ``n`` more steps."""
        target = len(self.metrics.steps) + n
        self.wait(lambda: len(self.metrics.steps) >= target, f"step {target}")

    def members_changed(self, names: set[str], what: str) -> bool:
        """Whether all ``names`` have ``joined`` or ``left``."""
        return names <= {name for record in self.metrics.members for name in getattr(record, what)}

    def log(self, process: str) -> str:
        return self.run_folder.log(process).read_text(errors="replace")

    def said(self, n: int = 30) -> str:
        """The ends of all logs and outputs."""
        paths = [*self.folder.parent.glob("*.out"), *self.run_folder.logs.glob("*.log")]
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-n:]) for path in paths
        )

    def assert_undisturbed(self) -> None:
        """No server was lost, no transfer repeated, no request of a group failed because a server left."""
        metrics, trainer = self.metrics, self.log("trainer-0")
        assert not [record for record in metrics.members if record.lost], self.said()
        assert not [record for record in metrics.publishes if record.lost], self.said()
        assert not re.search("is sent again|is excluded|does not answer", trainer), trainer
        assert metrics.steps[-1].retried == {}, metrics.steps[-1].retried
        assert set(metrics.steps[-1].dropped) <= {"stale"}, metrics.steps[-1].dropped
        assert [p.version for p in metrics.publishes] == list(range(len(metrics.publishes)))


@contextmanager
def elastic_run(root: Path, *overrides: str, vllm: bool, token_s: float = 0.01) -> Iterator[ElasticRun]:
    """A run with one server, of more steps than it will make; on leaving nothing of it remains."""
    environment = {"AREAL_LORA_TEST": uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}
    command = embedded_run(
        f"run.root={root}",
        "run.name=elastic",
        "run.steps=5000",
        "trainer.world_size=1",
        "trainer.ep=1",
        "adapters.gsm8k.sampling.prompts_per_step=16",
        "adapters.gsm8k.sampling.n_samples=4",
        "adapters.gsm8k.task.n_eval=8",
        "eval.every_steps=0",
        "rollout.max_num_seqs=16",
        "rollout.kv_cache_gib=0.05",
        *overrides,
    )
    command += forked_roles(root) if vllm else made_up_roles(root, token_s)
    with (root / "run.out").open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    run = ElasticRun(root / "elastic", process, environment)
    try:
        yield run
    finally:
        for left in [*run.added, process]:
            left.terminate()
        psutil.wait_procs([psutil.Process(p.pid) for p in [*run.added, process] if p.poll() is None], timeout=60)
        for orphan in marked(environment):
            orphan.kill()
        for left in [*run.added, process]:
            left.wait()


def made_up_roles(folder: Path, token_s: float = 0.0) -> list[str]:
    """``forked_roles`` with a server without a model, and a trainer that takes what it invents."""
    starter = starter_of(ROLES["trainer.python"])
    server = starter.interpreter(folder / "rollout.python", stand_in.__name__, {stand_in.TOKEN_S: str(token_s)})
    trainer = starter.interpreter(folder / "trainer.python", lenient_trainer.__name__)
    return [
        f"rollout.python={server}",
        f"trainer.python={trainer}",
        *forked_roles(folder, "cluster.controller_python"),
        "adapters.gsm8k.algorithm.behaviour_cap=1e9",
        "weight_sync.probe_tolerance=1e9",
    ]

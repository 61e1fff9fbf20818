"""A launcher process that runs small programs (``drive``), and all that belongs to it."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.cli.command import command_starter
from tests.support.clocks import WAIT_S
from tests.support.launcher import drive
from tests.support.launcher.stops import marked

Process = tuple[str, int, str | list[str]] | tuple[str, int, str | list[str], int]
"""Role, index, and the code or the command; the node, if it is not the first."""


class Run:
    """One launcher process, a fork, and all that it starts, whose environment carries its mark."""

    def __init__(
        self, folder: Path, grace_s: float, processes: list[Process], overrides: Sequence[str] = (), node: int = 0
    ) -> None:
        self.folder = folder
        self.mark = f"AREAL_LORA_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self._output = folder.with_suffix(f".out-{self.mark[-8:]}")
        arguments = [str(folder), str(grace_s), json.dumps(processes), *overrides]
        with self._output.open("wb") as output:
            environment = os.environ | {name: value, drive.AGENT: str(node)}
            self.process = command_starter().start(drive.__name__, arguments, environment, output)

    def alive(self) -> list[psutil.Process]:
        """What the launcher has started, found by their environment: also those that no parent knows any more."""
        name, _, value = self.mark.partition("=")
        return [process for process in marked({name: value}) if process.pid != self.process.pid]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"never happened; launcher: {self.process.poll()}"
            time.sleep(0.05)

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def end(self, timeout_s: float = WAIT_S) -> tuple[int, str]:
        return self.process.wait(timeout_s), self.printed


@contextmanager
def beginning(folder: Path) -> Iterator[Callable[..., Run]]:
    """Start launchers in ``folder``; kill on leaving what they left."""
    runs: list[Run] = []

    def start(*processes: Process, grace_s: float = 3.0, overrides: Sequence[str] = (), node: int = 0) -> Run:
        runs.append(Run(folder, grace_s, list(processes), overrides, node))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        for process in run.alive():
            process.kill()
        run.process.wait()

"""Stopping a run of stand-ins leaves nothing behind: every phase and every way in the suite, all 40 pairs at night."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.launcher import drive
from tests.support.launcher.stage import PHASES
from tests.support.launcher.stops import WAYS, Held, figures, marked, start, stop
from tests.support.paths import SUPPORT
from tests.support.sizes import sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STAGE = SUPPORT / "launcher" / "stage.py"
PROCESSES = [("server", 0), ("controller", 0), ("trainer", 0), ("trainer", 1)]
CHOSEN = sample([(phase, way) for phase in PHASES for way in WAYS], 0, lambda pair: pair)
seconds: dict[tuple[str, str], float] = {}


class Run:
    """A launcher with stand-ins, all in one phase."""

    def __init__(self, folder: Path, phase: str) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.environment = {"AREAL_LORA_TEST": self.mark, "SHARED": f"areal_lora_test_{self.mark}"}
        self.output = folder.with_suffix(".out")
        folder.mkdir(parents=True)
        codes = [(role, index, self.code(role, index, phase)) for role, index in PROCESSES]
        self.process = start(drive.__name__, [str(folder), "2.0", json.dumps(codes)], self.environment, self.output)

    def code(self, role: str, index: int, phase: str) -> str:
        argv = ["stage", role, str(index), phase, str(self.folder)]
        return f"import runpy, sys; sys.argv = {argv!r}; runpy.run_path({str(STAGE)!r}, run_name='__main__')"

    def wait(self) -> None:
        deadline = time.monotonic() + 150
        logs = [self.folder / "logs" / f"{role}-{index}.log" for role, index in PROCESSES]
        while not all(log.exists() and "ready" in log.read_text() for log in logs):
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, [(log.name, log.exists() and log.read_text()) for log in logs]
            time.sleep(0.05)


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Run]]:
    """One run for each way of stopping that is chosen in the phase."""
    phase = request.param
    made = {way: Run(tmp_path / way.replace(" ", "-"), phase) for way in WAYS if (phase, way) in CHOSEN}
    try:
        yield made
    finally:
        for run in made.values():
            run.process.kill()
            for process in marked(run.environment):
                process.kill()
            run.process.wait()
            for path in Path("/dev/shm").glob(f"{run.environment['SHARED']}*"):
                path.unlink()


@pytest.mark.parametrize(("runs", "phase"), [(phase, phase) for phase in PHASES], ids=PHASES, indirect=["runs"])
def test_nothing_is_left(runs: dict[str, Run], phase: str) -> None:
    for run in runs.values():
        run.wait()
    held = {way: Held.by(run.environment) for way, run in runs.items()}
    for way, run in runs.items():
        assert any(name.startswith(run.environment["SHARED"]) for name in held[way].shared)
        assert len(held[way].ports) >= len(PROCESSES) - (phase == "closing")

    def gone_after_s(way: str) -> float:
        began_s = time.monotonic()
        stop(runs[way].process, way)
        return held[way].gone_after_s(runs[way].environment, began_s)

    with ThreadPoolExecutor(len(runs)) as threads:
        for way, gone_s in zip(runs, threads.map(gone_after_s, runs), strict=True):
            seconds[phase, way] = gone_s
    for way, run in runs.items():
        code = run.process.wait(150)
        assert code == (-9 if way == "launcher killed" else 130), f"{way}: {run.output.read_text()}"


def test_seconds_until_nothing_is_left() -> None:
    if len(seconds) == len(CHOSEN):
        for way in WAYS:
            print(f"\n{way}: {figures(s for (_, w), s in seconds.items() if w == way)}", end="")
        print(f"\nall: {figures(seconds.values())}")

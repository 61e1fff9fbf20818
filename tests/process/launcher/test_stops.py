"""Stopping a run of stand-ins leaves nothing behind: every phase and every way in the suite, all 40 pairs at night."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
AT_ONCE = 4


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


def stopped(folder: Path, phase: str, way: str) -> float:
    """Seconds until nothing was left of a run that was stopped in ``phase``."""
    run = Run(folder, phase)
    try:
        run.wait()
        held = Held.by(run.environment)
        assert any(name.startswith(run.environment["SHARED"]) for name in held.shared)
        assert len(held.ports) >= len(PROCESSES) - (phase == "closing")
        began_s = time.monotonic()
        stop(run.process, way)
        gone_s = held.gone_after_s(run.environment, began_s)
        code = run.process.wait(150)
        assert code == (-9 if way == "launcher killed" else 130), run.output.read_text()
        return gone_s
    finally:
        run.process.kill()
        for process in marked(run.environment):
            process.kill()
        run.process.wait()
        for path in Path("/dev/shm").glob(f"{run.environment['SHARED']}*"):
            path.unlink()


Outcomes = dict[tuple[str, str], Future[float]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """What becomes of each run; some are side by side."""
    root = tmp_path_factory.mktemp("stops")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {
            (phase, way): threads.submit(stopped, root / f"{phase} {way}".replace(" ", "-"), phase, way)
            for phase, way in CHOSEN
        }


@pytest.mark.parametrize(("phase", "way"), CHOSEN, ids=[", ".join(pair) for pair in CHOSEN])
def test_nothing_is_left(outcomes: Outcomes, phase: str, way: str) -> None:
    outcomes[phase, way].result()


def test_seconds_until_nothing_is_left(outcomes: Outcomes) -> None:
    if all(outcome.exception() is None for outcome in outcomes.values()):
        seconds = {pair: outcome.result() for pair, outcome in outcomes.items()}
        for way in WAYS:
            print(f"\n{way}: {figures(s for (_, w), s in seconds.items() if w == way)}", end="")
        print(f"\nall: {figures(seconds.values())}")

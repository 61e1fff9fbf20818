"""The loop of the command: batches, the end of the run, interrupts, one process at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.records import CheckpointRecord, StepRecord
from areal_lora.obs.tracking.tracker import ROWS, Ending, MetricsRow, follow, only_one
from areal_lora.run_folder.events import JsonlSink
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_config


@dataclass
class Recorder:
    """A tracker in memory."""

    where: str = "memory"
    holds: int = 0
    rows: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    endings: list[Ending | None] = field(default_factory=list)

    def held(self) -> int:
        return self.holds

    def send(self, rows: Sequence[MetricsRow]) -> None:
        self.rows += [row.line for row in rows]
        self.batches.append(len(rows))

    def end(self, ending: Ending | None) -> None:
        self.endings.append(ending)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.config.write_text(make_config().model_dump_json())
    return folder


def write(folder: RunFolder, versions: range) -> None:
    sink = JsonlSink(folder.metrics)
    for version in versions:
        sink.write(msgspec.json.encode(CheckpointRecord(version=version, write_s=0.1, adapter="toy")))
    sink.close()


def test_it_follows_until_the_run_has_ended_and_sends_the_last_lines(folder: RunFolder) -> None:
    tracker, written = Recorder(), 0
    states: list[str | None] = [None, None, "done"]

    def ended() -> str | None:
        nonlocal written
        write(folder, range(written + 1, written + 3))
        written += 2
        if len(states) == 1:
            sink = JsonlSink(folder.metrics)
            sink.write(msgspec.json.encode(StepRecord(step=6, version=6, time_s=1.0, adapter="toy")))
            sink.close()
        return states.pop(0)

    slept: list[float] = []
    assert follow(folder, tracker, ended, sleep=slept.append) == "done"
    assert tracker.rows == [1, 2, 3, 4, 5, 6, 7], "the last step has no checkpoint and is sent at the end"
    assert len(slept) == 2
    [ending] = tracker.endings
    assert ending is not None
    assert (ending.state, ending.summary) == ("done", {})
    assert ending.report.startswith("<!doctype html>")


def test_the_report_has_no_credentials_of_a_traceback(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-live-0123456789")
    log = folder.log("controller-0")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(
        "12:00:00.000 controller-0 ERROR areal_lora.x: failed\n"
        'Traceback (most recent call last):\n  File "reward.py", line 3, in reward\n'
        "ConnectionError: postgresql://bot:hunter2@db/answers and https://j/v1?key=sk-live-0123456789\n"
    )
    tracker = Recorder()
    follow(folder, tracker, lambda: "done")
    [ending] = tracker.endings
    assert ending is not None
    assert "postgresql://db/answers" in ending.report
    assert "hunter2" not in ending.report
    assert "sk-live" not in ending.report


def test_a_stopped_run_keeps_what_its_resume_would_repeat(folder: RunFolder) -> None:
    write(folder, range(1, 3))
    sink = JsonlSink(folder.metrics)
    sink.write(msgspec.json.encode(StepRecord(step=6, version=6, time_s=1.0, adapter="toy")))
    sink.close()
    tracker = Recorder()
    assert follow(folder, tracker, lambda: "stopped") == "stopped"
    assert tracker.rows == [1, 2]
    [ending] = tracker.endings
    assert ending is not None
    assert ending.state == "stopped"


def test_without_following_it_ends_and_the_run_continues(folder: RunFolder) -> None:
    tracker = Recorder(holds=2)
    write(folder, range(1, 5))
    assert follow(folder, tracker, lambda: None, wait=False) is None
    assert (tracker.rows, tracker.endings) == ([3, 4], [None])


def test_a_long_file_is_sent_in_batches(folder: RunFolder) -> None:
    tracker = Recorder()
    write(folder, range(1, 2 * ROWS + 2))
    follow(folder, tracker, lambda: "stopped")
    assert tracker.batches == [ROWS, ROWS, 1]


def test_an_interrupt_reaches_the_tracker(folder: RunFolder) -> None:
    tracker = Recorder()

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(folder, tracker, lambda: None, sleep=interrupted)
    assert tracker.endings == [None]


def test_a_second_process_for_one_tracker_is_refused(folder: RunFolder) -> None:
    with only_one(folder, "wandb"):
        with only_one(folder, "mlflow"):
            pass
        with pytest.raises(ConfigError, match="another process sends this run to wandb"), only_one(folder, "wandb"):
            pass
    with only_one(folder, "wandb"):
        pass

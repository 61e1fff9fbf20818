"""The key of a run in a tracker: the same for every process that tracks it, and for no other run."""

from __future__ import annotations

from pathlib import Path

from areal_lora.obs.tracking.tracker import tracked_run
from areal_lora.run_folder.events import RestartEvent, StartEvent, write_event
from areal_lora.run_folder.paths import RunFolder


def run(folder: Path, at: str) -> RunFolder:
    folder.mkdir(parents=True)
    write_event(RunFolder(folder), StartEvent(at=at, resumes=False))
    return RunFolder(folder)


def test_the_key_survives_a_resume_and_a_move_and_differs_after_a_fresh_start(tmp_path: Path) -> None:
    folder = run(tmp_path / "one" / "x", "2026-01-01T00:00:00Z")
    first = tracked_run(folder, None, {})
    assert (first.name, first.started_at) == ("x", "2026-01-01T00:00:00Z")
    assert first.key.startswith("x-")
    write_event(folder, RestartEvent(at="2026-01-02T00:00:00Z", process="trainer", how="was killed"))
    write_event(folder, StartEvent(at="2026-01-03T00:00:00Z", resumes=True))
    assert tracked_run(folder, None, {}) == first
    moved = tmp_path / "two" / "x"
    moved.parent.mkdir()
    folder.path.rename(moved)
    assert tracked_run(RunFolder(moved), None, {}).key == first.key
    fresh = run(tmp_path / "one" / "x", "2026-01-04T00:00:00Z")
    keys = {first.key, tracked_run(fresh, None, {}).key, tracked_run(fresh, "shown", {}).key}
    assert len(keys) == 3


def test_the_key_is_a_name_that_every_tracker_takes(tmp_path: Path) -> None:
    folder = run(tmp_path / ("n" * 200), "2026-01-01T00:00:00Z")
    assert len(tracked_run(folder, "a/b c", {}).key) < 128


def test_a_run_without_events_has_a_key(tmp_path: Path) -> None:
    assert tracked_run(RunFolder(tmp_path), None, {}).started_at == ""

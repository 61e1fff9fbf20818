"""Requeues without a new checkpoint are counted over the job's lifetimes."""

from __future__ import annotations

from pathlib import Path

from areal_lora.launcher.slurm.job import Lifetime, next_lifetime, read_lifetime, too_many, write_lifetime
from areal_lora.run_folder.paths import RunFolder

NONE: dict[str, int] = {}


def test_lifetimes_without_progress_add_up_and_a_checkpoint_begins_the_count_again() -> None:
    life = next_lifetime(None, "17", 0, NONE)
    counts = [life.without]
    for restarts, newest in enumerate([NONE, NONE, {"math": 3}, {"math": 3}, {"math": 4}, {"math": 4, "code": 1}], 1):
        life = next_lifetime(life, "17", restarts, newest)
        counts.append(life.without)
    assert counts == [0, 1, 2, 0, 1, 0, 0]


def test_a_job_that_was_submitted_again_begins_to_count_again() -> None:
    last = Lifetime(job="17", restarts=3, newest=NONE, without=3)
    assert next_lifetime(last, "18", 0, NONE).without == 0


def test_a_restart_of_the_same_lifetime_is_no_requeue() -> None:
    last = Lifetime(job="17", restarts=1, newest=NONE, without=1)
    assert next_lifetime(last, "17", 1, NONE).without == 0


def test_the_bound() -> None:
    assert not too_many(2, 2)
    assert "3 times in a row without a new checkpoint (run.max_restarts is 2" in too_many(3, 2)
    assert "requeued once in a row" in too_many(1, 0)


def test_the_record_survives_and_a_broken_one_counts_from_the_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    assert read_lifetime(folder) is None
    life = Lifetime(job="17", restarts=1, newest={"math": 3}, without=1, reason="USR1 arrived")
    write_lifetime(folder, life)
    assert read_lifetime(folder) == life
    folder.job_requeues.write_text("{")
    assert read_lifetime(folder) is None

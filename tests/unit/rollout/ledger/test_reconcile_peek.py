"""What a resume would do with a ledger, told from a copy while the original stays as it is."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger.ledger import GroupState, Ledger, LedgerFile
from areal_lora.rollout.ledger.reconcile import group_counts, reconciliations, take_snapshot, write_counts
from areal_lora.run_folder.paths import RunFolder

KEPT: list[LedgerFile] = []  # a connection that is collected would fold its log in
WRITER = """
import sys, time
from areal_lora.rollout.ledger.ledger import LedgerFile
from areal_lora.rollout.ledger.ledger import Ledger
file = LedgerFile(sys.argv[1], "run")
book = Ledger(file, "math", "o")
while True:
    for _ in range(100):
        book.issue(book.head.issued, 1)
    book.flush()
    print(flush=True) if book.head.issued == 100 else None
    time.sleep(0.25)
"""


def write_ledger(folder: Path) -> bytes:
    """Two groups in each of steps 0 to 2, of which step 0 is committed, one done, one running, one issued.

    Left as by a kill: with a write-ahead log that was not folded in. Returns the snapshot for version 2.
    """
    file = LedgerFile(RunFolder(folder).ledger, "run")
    ledger = Ledger(file, "math", "the prompts")
    seqs = [ledger.issue(position, 1) for position in range(9)]
    for n, seq in enumerate(seqs[:8]):
        ledger.run(seq, version=n // 2)
    for n, seq in enumerate(seqs[:7]):
        ledger.finish(seq, oldest=min(2, n // 2), newest=min(2, n // 2), payload=b"tokens")
    for step in range(3):
        ledger.lease(seqs[2 * step : 2 * step + 2], step)
    ledger.consume(0)
    ledger.head.next_version = 3
    snapshot = take_snapshot(ledger, 2)
    file.flush()
    KEPT.append(file)
    return snapshot


def test_groups_are_counted_and_nothing_is_touched(tmp_path: Path) -> None:
    snapshot = write_ledger(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    made = reconciliations(RunFolder(tmp_path), "run", {"math": 2}, {"math": snapshot})["math"]
    assert [row.position for row in made.consumed] == [2, 3], "step 1 was learned and its commit never arrived"
    assert [row.position for row in made.again] == [4, 5], "step 2 was leased to a trainer that is gone"
    assert [row.position for row in made.reissued] == [7], "it runs on a version that is gone"
    assert [row.position for row in made.continuing] == [6, 8]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_sampling_is_part_of_what_a_resume_would_do(tmp_path: Path) -> None:
    snapshot = write_ledger(tmp_path)
    Ledger(KEPT[-1], "math", "the prompts").head.sampled = "temperature 1"
    KEPT[-1].flush()
    for now, rebuilt in (("temperature 1", False), ("temperature 0.7", True)):
        found = reconciliations(RunFolder(tmp_path), "run", {"math": 2}, {"math": snapshot}, {"math": now})
        assert bool(found["math"].rebuild) == rebuilt


def test_groups_by_state_are_read_while_the_file_is_open(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert group_counts(run, ended=True) == {}
    write_ledger(tmp_path)
    file = KEPT[-1]
    ledger = Ledger(file, "math", "the prompts")
    ledger.drop(ledger.issue(9, 1), "scorer")
    file.flush()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(sqlite3.OperationalError, match="locked"), closing(sqlite3.connect(file.path, timeout=0)) as db:
        db.execute("SELECT * FROM groups").fetchall()
    assert group_counts(run, ended=False) == {}, "a running controller has not counted yet"
    [(adapter, found)] = group_counts(run, ended=True).items()
    assert {state.name.lower(): n for state, n in found.states.items()} == {
        "issued": 1,
        "running": 1,
        "done": 1,
        "leased": 4,
        "consumed": 2,
        "dropped": 1,
    }
    assert (adapter, found.dropped) == ("math", {"scorer": 1})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    ledger.issue(10, 1)
    write_counts(run, file)
    counted = group_counts(run, ended=False)["math"]
    assert counted.states == {**found.states, GroupState.ISSUED: 2}, "of this moment, before any flush"
    assert counted.dropped == {"scorer": 1}
    assert group_counts(run, ended=True) == {adapter: found}, "of the last flush"
    run.group_counts.write_bytes(b"")
    assert group_counts(run, ended=False) == {}, "damaged by a loss of power"


def test_groups_of_adapters_that_have_left_are_counted_once_the_run_has_ended(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    file = LedgerFile(run.ledger, "run")
    for n, name in enumerate(("trial-1", "trial-2", "trial-3"), 1):
        ledger = Ledger(file, name, "the prompts")
        for _ in range(n):
            ledger.drop(ledger.issue(0, 1), "scorer")
        if name != "trial-3":
            ledger.close()
    write_counts(run, file)
    file.close()
    assert {name: found.dropped for name, found in group_counts(run, ended=False).items()} == {"trial-3": {"scorer": 3}}
    assert {name: found.dropped["scorer"] for name, found in group_counts(run, ended=True).items()} == {
        "trial-1": 1,
        "trial-2": 2,
        "trial-3": 3,
    }


def test_the_counts_of_a_running_run_copy_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*_: object) -> NoReturn:
        pytest.fail("hundreds of MiB were copied")

    write_ledger(tmp_path)
    write_counts(RunFolder(tmp_path), KEPT[-1])
    monkeypatch.setattr(shutil, "copy", copied)
    assert sum(group_counts(RunFolder(tmp_path), ended=False)["math"].states.values()) == 9


def test_a_lost_ledger_is_rebuilt_from_the_snapshot(tmp_path: Path) -> None:
    snapshot = write_ledger(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert "snapshot" in str(reconciliations(RunFolder(tmp_path), "run", {"math": 2}, {"math": snapshot})["math"])
    with pytest.raises(RolloutError, match="no ledger snapshot"):
        reconciliations(RunFolder(tmp_path), "run", {"math": 2}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_issued_nothing(tmp_path: Path) -> None:
    made = reconciliations(RunFolder(tmp_path), "run", {"math": 0}, {})["math"]
    assert str(made).startswith("0 groups committed late")
    assert list(tmp_path.iterdir()) == []


def test_the_ledger_of_a_running_controller_is_copied_between_two_writes(tmp_path: Path) -> None:
    """As often as the file changes under the copy, it is copied again; what is told is of one moment."""
    run = tmp_path / "run"
    run.mkdir()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(RunFolder(run).ledger)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        for _ in range(10):
            made = reconciliations(RunFolder(run), "run", {"math": 0}, {})["math"]
            assert not made.rebuild
            assert len(made.continuing) % 100 == 0
    finally:
        writer.kill()
        writer.wait()


def test_a_ledger_that_never_rests_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ledger(tmp_path)
    copy = shutil.copy

    def written_meanwhile(path: Path, folder: Path) -> None:
        copy(path, folder)
        os.utime(path)

    monkeypatch.setattr(shutil, "copy", written_meanwhile)
    monkeypatch.setattr("areal_lora.rollout.ledger.reconcile.PAUSE_S", 0.0)
    with pytest.raises(RolloutError, match=r"ledger.sqlite is being written: the run has not ended"):
        reconciliations(RunFolder(tmp_path), "run", {"math": 2}, {})

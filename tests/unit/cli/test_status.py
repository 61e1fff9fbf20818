"""The text of a status."""

from __future__ import annotations

from pathlib import Path

import msgspec

from areal_lora.cli.status import AdapterStatus, JobStatus, ProcessStatus, Status, group_rows, render
from areal_lora.rollout.ledger.reconcile import write_counts
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.rollout.helpers import NAME, open_ledger

SEEN = Status(
    run="moe",
    folder="/runs/moe",
    kind="slurm",
    state="waiting",
    why="the job waits: jobs of higher priority are before it",
    launcher_pid=None,
    launcher_host=None,
    steps_done=12,
    steps=60,
    eta_s=75.0,
    step_s=1.5,
    training={"speed/tokens_per_s": 1234.4, "speed/mfu": 0.408, "memory/peak_gib": 61.23, "memory/base_gib": 7.0},
    reward=0.5,
    accuracy=0.25,
    accuracy_version=10,
    staleness={0: 30, 1: 10},
    staleness_mean=0.25,
    checkpoints={"gsm8k": 12},
    checkpoint_age_s=3.2,
    restarts={"server-0": 1},
    requeues=2,
    starts=3,
    job=JobStatus(id="7", state="PENDING", reason="Priority", phase="waiting", nodes="", restarts=2, text=""),
    processes=[
        ProcessStatus(name="trainer-0", node="n1", pid=12, alive=True, beat_s=0.5, doing="step 12: training gsm8k"),
        ProcessStatus(name="server-0", node="", pid=None, alive=None, beat_s=4.2, doing=""),
    ],
    groups_equal=0.5,
    faults=["scorer: 70 retried, 6 dropped, last: error: TypeError: x (reward.py:9)"],
)


def test_the_text_has_every_figure_in_one_line_each() -> None:
    assert render(SEEN).splitlines() == [
        "run         moe in /runs/moe",
        "state       waiting: the job waits: jobs of higher priority are before it",
        "job         7 PENDING (Priority)",
        "step        12/60   1.50 s a step   trains 1234 tok/s/device   mfu 41%   peak 61.2 GiB   ETA 1:15",
        "reward      0.500   accuracy 0.250 (v10)   50% of groups equal",
        "faults      scorer: 70 retried, 6 dropped, last: error: TypeError: x (reward.py:9)",
        "staleness   0:75% 1:25%   mean 0.25",
        "checkpoint  gsm8k@v12, 0:03 ago",
        "restarts    server-0 1, requeued 2, started 3",
        "",
        "process    node  pid  state              doing",
        "trainer-0  n1    12   alive              step 12: training gsm8k",
        "server-0   -     -    heartbeat 4 s ago  -",
    ]


def test_several_adapters_are_a_table_between_rows_and_processes() -> None:
    math = AdapterStatus(
        name="math",
        state=AdapterPhase.ACTIVE,
        reason="",
        steps_done=9,
        steps=40,
        reward=0.5,
        accuracy=0.25,
        accuracy_version=8,
        lag=0.75,
        share=0.625,
        checkpoint=8,
    )
    code = msgspec.structs.replace(
        math, name="code", state=AdapterPhase.FAILED, reason="the disk is full", steps_done=3, steps=20, lag=None
    )
    new = msgspec.structs.replace(
        math, name="new", state=AdapterPhase.PENDING, steps_done=0, reward=None, accuracy=None, accuracy_version=None
    )
    new = msgspec.structs.replace(new, lag=None, share=0.0, checkpoint=None)
    text = render(msgspec.structs.replace(SEEN, reward=None, accuracy=None, adapters=[math, code, new]))
    assert text.splitlines()[5:14] == [
        "staleness   0:75% 1:25%   mean 0.25",
        "checkpoint  gsm8k@v12, 0:03 ago",
        "restarts    server-0 1, requeued 2, started 3",
        "",
        "adapter  state    step  reward  accuracy    lag   share  checkpoint  why",
        "math     active   9/40  0.500   0.250 (v8)  0.75  62%    v8          -",
        "code     failed   3/20  0.500   0.250 (v8)  -     62%    v8          the disk is full",
        "new      pending  0/40  -       -           -     0%     -           -",
        "",
    ]


def test_groups_of_a_run_are_counted_by_its_controller_or_once_it_has_ended(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    file, book = open_ledger(run.ledger)
    book.drop(book.issue(0, 1), "scorer")
    book.issue(1, 1)
    file.close()
    row = (NAME, "1", "0", "0", "0", "0", "1", "scorer 1")
    assert group_rows(run, "running")[1:] == []
    assert group_rows(run, "stopped")[1:] == [row]
    write_counts(run, file)
    assert group_rows(run, "running")[1:] == [row]

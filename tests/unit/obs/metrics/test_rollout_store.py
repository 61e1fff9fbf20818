"""Files of rollouts: every value comes back, the limit holds, whole after a crash at any point, nothing twice."""

from __future__ import annotations

import logging
import os
import random
import resource
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_lora.obs.metrics import rollout_store
from areal_lora.obs.metrics.records import DroppedGroup
from areal_lora.obs.metrics.rollout_store import RolloutWriter, rollout_table, segments
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import Outcome
from tests.support.obs.rollouts import PROMPT, VOCABULARY, keep, step_rollouts
from tests.support.sizes import size


def kept(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.ParquetFile(each.path).read() for each in segments(RunFolder(folder).rollouts)])


def steps_of(folder: Path, adapter: str = "toy") -> list[int]:
    return [row["step"] for row in kept(folder).to_pylist() if row["adapter"] == adapter]


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in RunFolder(folder).rollouts.iterdir())


def test_every_value_comes_back(tmp_path: Path) -> None:
    given = step_rollouts(5)
    keep(RunFolder(tmp_path), [given])
    rows = kept(tmp_path).to_pylist()
    trajectories = [t for group in given.groups for t in group.trajectories]
    assert len(rows) == len(trajectories) == 8
    at = 0
    for row, t in zip(rows, trajectories, strict=True):
        part = slice(at, at := at + len(t.columns))
        on = np.array(t.loss_mask, bool)
        assert row["token_ids"] == t.token_ids
        assert row["logprobs"] == t.rollout_logprobs
        assert row["trainer_logprobs"] == given.trainer_logprobs[part].tolist()
        assert row["entropies"] == given.entropies[part].tolist()
        assert row["advantages"] == given.advantages[part].tolist()
        assert row["versions"] == [-1, PROMPT, 4, 3, 5, 3]
        assert row["advantage"] == pytest.approx(given.advantages[part][on].mean())
        assert row["mismatch"] == pytest.approx(0.25)
        assert (row["reward"], dict(row["components"])) == (t.reward, t.components)
        assert (row["oldest"], row["newest"], row["stale"]) == (4, 5, True)
    assert [row["solved"] for row in rows] == [False, True] * 4
    assert [row["truncated"] for row in rows] == [True, False, False, False] * 2
    assert [row["retried"] for row in rows] == [True] * 4 + [False] * 4
    assert [row["group"] for row in rows] == [0] * 4 + [1] * 4
    assert rows[5]["prompt"] == "Problem 1 of step 5?"
    assert (rows[5]["answer"], rows[5]["turns"]) == ("answer 1 of step 5", given.texts[1].turns[1])
    words = pq.read_table(RunFolder(tmp_path).rollouts / "vocabulary.parquet")["text"].to_pylist()
    assert words == VOCABULARY


def test_what_the_trainer_did_not_compute_is_null() -> None:
    table = rollout_table(step_rollouts(0, scored=False), 0)
    assert {x for name in ("mismatch", "trainer_logprobs", "entropies") for x in table[name].to_pylist()} == {None}
    assert table.schema == rollout_table(step_rollouts(0), 0).schema
    assert not any(table["stale"].to_pylist())


def test_a_workflow_that_returns_fewer_texts_has_empty_answers() -> None:
    given = step_rollouts(0, groups=1, n=2)
    texts = (msgspec.structs.replace(given.texts[0], answers=("only",)),)
    assert rollout_table(replace(given, texts=texts), 0)["answer"].to_pylist() == ["only", ""]


def test_the_limit_holds_and_the_start_and_the_newest_stay(tmp_path: Path) -> None:
    limit, writer = 120_000, RolloutWriter(RunFolder(tmp_path), 120_000, lambda: VOCABULARY)
    for step in range(60):
        writer.write(step_rollouts(step, groups=4, n=8))
    writer.close()
    assert writer.left_out == 0
    assert 0.5 * limit < nbytes(tmp_path) <= limit
    steps = sorted(set(steps_of(tmp_path)))
    assert steps[0] == 0
    assert steps[-1] == 59
    holes = [b - a for a, b in pairwise(steps) if b > a + 1]
    assert len(holes) == 1, "the oldest are removed, after the first file"
    assert len(segments(RunFolder(tmp_path).rollouts)) < 30, "small files are merged"
    rows = kept(tmp_path)
    assert rows["rollout"].to_pylist() == sorted(set(rows["rollout"].to_pylist()))


def test_a_step_beyond_the_limit_is_counted_and_later_ones_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = list[int]()
    table_of = rollout_store.rollout_table
    monkeypatch.setattr(rollout_store, "rollout_table", lambda step, n: tables.append(step.step) or table_of(step, n))
    writer = RolloutWriter(RunFolder(tmp_path), 60_000, lambda: VOCABULARY)
    with caplog.at_level(logging.WARNING):
        for step, groups in enumerate((1, 500, 1, 200)):
            writer.write(step_rollouts(step, groups=groups, tokens=20))
        writer.close()
    assert tables == [0, 2, 3], "40,000 sampled tokens are not encoded in vain, 16,000 might have fitted"
    assert (writer.left_out, sorted(set(steps_of(tmp_path)))) == (2800, [0, 2])
    assert "step 1 of toy are not kept: a step of them exceeds run.keep_rollouts_mib" in caplog.text


def test_what_comes_faster_than_it_is_written_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_store, "WAITING_BYTES", -1)
    writer = RolloutWriter(RunFolder(tmp_path), 1 << 20, lambda: VOCABULARY)
    writer.write(step_rollouts(0))
    writer.close()
    assert writer.left_out == 8
    assert segments(RunFolder(tmp_path).rollouts) == []


def test_a_resumed_run_has_no_rollout_twice(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    keep(folder, [step_rollouts(step, adapter=name) for step in range(6) for name in ("a", "b")])
    writer = RolloutWriter(folder, 64 << 20, lambda: VOCABULARY)
    writer.drop("a", 3)
    writer.write(step_rollouts(3, adapter="a", texts=["again"]))
    writer.close()
    assert sorted(set(steps_of(tmp_path, "a"))) == [0, 1, 2, 3]
    assert sorted(set(steps_of(tmp_path, "b"))) == [0, 1, 2, 3, 4, 5]
    again = {
        row["rollout"]: row["answer"] for row in kept(tmp_path).to_pylist() if (row["adapter"], row["step"]) == ("a", 3)
    }
    assert again[min(again)] == "again"
    assert len(steps_of(tmp_path, "a")) == 4 * 8


@pytest.mark.parametrize("left", [0, 1000])
def test_what_a_loss_of_power_damaged_is_renamed_and_the_rest_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    folder = RunFolder(tmp_path)
    keep(folder, [step_rollouts(step) for step in range(3)])
    second, words = segments(folder.rollouts)[1].path, folder.rollouts / "vocabulary.parquet"
    for path in (second, words):
        path.write_bytes(path.read_bytes()[:left])
    for step in (2, 3):  # two starts: the first renames, the second leaves what is renamed
        writer = RolloutWriter(folder, 64 << 20, lambda: VOCABULARY)
        writer.drop("toy", step)
        writer.write(step_rollouts(step))
        writer.close()
    assert sorted(set(steps_of(tmp_path))) == [0, 2, 3]
    assert pq.read_table(words)["text"].to_pylist() == VOCABULARY
    assert second.with_name(f"{second.name}.damaged").stat().st_size == left
    assert f"{second} is damaged" in caplog.text
    assert "rollouts are not kept" not in caplog.text


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files of this process may have no more than 1,000 bytes."""
    soft_hard, writer = resource.getrlimit(resource.RLIMIT_FSIZE), RolloutWriter(RunFolder(tmp_path), 1 << 20, list)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, soft_hard[1]))
    try:
        with caplog.at_level(logging.WARNING):
            for step in range(3):
                writer.write(step_rollouts(step))
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    writer.write(step_rollouts(3))
    [warning] = [record.getMessage() for record in caplog.records]
    assert "rollouts are not kept from here on" in warning
    assert "File too large" in warning
    assert segments(RunFolder(tmp_path).rollouts) == []


CRASHING = """
import os, signal, sys
from areal_lora.obs.metrics import rollout_store
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.rollouts import VOCABULARY, step_rollouts
rollout_store.MERGED_FILES = 3
folder, left, first = RunFolder.of(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def counted(event, arguments):
    global left
    if event in ("open", "os.remove", "os.rename", "os.mkdir") and str(folder.rollouts) in str(arguments[0]):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(counted)
writer = rollout_store.RolloutWriter(folder, 400_000, lambda: VOCABULARY)
writer.drop("toy", first)
for step in range(first, first + 12):
    writer.write(step_rollouts(step))
writer.close()
"""


def test_a_kill_at_any_operation_leaves_whole_files_and_nothing_twice(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    rng, first = random.Random(seed), 0
    for kill_at in [*rng.sample(range(1, 60), size(3, 12)), 10**6]:
        done = subprocess.run(
            [sys.executable, "-c", CRASHING, str(tmp_path), str(kill_at), str(first)],
            env=os.environ | {"PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode in (0, -9), done.stderr
        steps = steps_of(tmp_path) if segments(RunFolder(tmp_path).rollouts) else []
        last = max(steps, default=-1)
        assert steps == [step for step in range(last + 1) for _ in range(8)], f"killed at operation {kill_at}"
        first = max(0, last - 1)
    assert done.returncode == 0
    assert last == first + 1 >= 11
    assert not list(RunFolder(tmp_path).rollouts.glob(".*"))


def test_an_answer_without_a_score_has_no_reward() -> None:
    given = step_rollouts(0, groups=1, n=2)
    [group] = given.groups
    first = replace(group.trajectories[0], outcome=Outcome.ERROR, reward=0.0)
    group = replace(group, trajectories=(first, *group.trajectories[1:]))
    lost = DroppedGroup(reason="scorer: down", group=group, text=given.texts[0])
    table = rollout_table(replace(given, dropped=(lost,)), 0)
    assert str(table["reward"].to_pylist()) == "[0.0, 1.0, nan, 1.0]"
    assert table["dropped"].to_pylist() == [None, None, "scorer: down", "scorer: down"]

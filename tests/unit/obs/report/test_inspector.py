"""Queries of rollouts, against a scan of the rows as they are in the files."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_lora.obs.metrics import rollout_store
from areal_lora.obs.metrics.rollout_store import RolloutWriter, segments
from areal_lora.obs.report import inspector
from areal_lora.obs.report.inspector import GroupPlace, RolloutFilter, RolloutIndex
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.rollouts import PROMPT, VOCABULARY, keep, step_rollouts

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two adapters; row groups of 7 rows, so that pages, groups and searches cross their ends."""
    found = RunFolder(tmp_path_factory.mktemp("run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_store, "ROWS", 7)
        patch.setattr(rollout_store, "MERGED_FILES", 5)
        lost = {(5, "a"): ("stale", "scorer: down"), (STEPS - 1, "b"): ("no_variance",)}
        places = [(step, name) for step in range(STEPS) for name in ("a", "b")]
        keep(found, [step_rollouts(*at[:1], adapter=at[1], dropped=lost.get(at, ())) for at in places])
    return found


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inspector, rollout_store):
        monkeypatch.setattr(module, "ROWS", 7)


def rows_of(folder: RunFolder) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.concat_tables(
        [pq.ParquetFile(each.path).read() for each in segments(folder.rollouts)]
    ).to_pylist()
    return rows


def all_pages(index: RolloutIndex, **chosen: Any) -> list[int]:
    found, below = list[int](), None
    while True:
        page = index.page(RolloutFilter(**chosen, below=below))
        assert len(page.rows) <= inspector.PAGE
        found += [head.rollout for head in page.rows]
        if (below := page.below) is None:
            return found


FILTERS: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
    ({}, lambda row: True),
    ({"adapter": "b"}, lambda row: row["adapter"] == "b"),
    ({"adapter": "c"}, lambda row: False),
    ({"step": 3}, lambda row: row["step"] == 3),
    ({"outcome": "solved"}, lambda row: row["solved"] is True),
    ({"outcome": "failed", "lowest": -1.0}, lambda row: row["solved"] is False),
    ({"outcome": "truncated"}, lambda row: row["truncated"]),
    ({"outcome": "stale"}, lambda row: row["oldest"] < row["step"]),
    ({"outcome": "retried", "adapter": "a"}, lambda row: row["group"] in (0, 2) and row["adapter"] == "a"),
    ({"outcome": "dropped"}, lambda row: row["dropped"] is not None),
    ({"outcome": "trained", "step": 5}, lambda row: row["step"] == 5 and row["dropped"] is None),
    ({"lowest": 0.5, "highest": 1.0}, lambda row: row["reward"] == 1.0),
    ({"text": "answer 3 of step 1"}, lambda row: "answer 3 of step 1" in row["answer"]),
    (
        {"text": "Problem 1 of step 7?", "outcome": "failed"},
        lambda row: (row["step"], row["group"], row["solved"]) == (7, 1, False),
    ),
    ({"text": "nowhere"}, lambda row: False),
]


@pytest.mark.parametrize(("chosen", "matches"), FILTERS, ids=[str(chosen) for chosen, _ in FILTERS])
def test_pages_have_what_matches_newest_first(
    folder: RunFolder, chosen: dict[str, Any], matches: Callable[[dict[str, Any]], bool]
) -> None:
    expected = [row["rollout"] for row in rows_of(folder) if matches(row)][::-1]
    index = RolloutIndex(folder)
    assert all_pages(index, **chosen) == expected
    found = [table for table in index.tables(RolloutFilter(**chosen)) if len(table)]
    assert [n for table in found for n in table["rollout"].to_pylist()] == expected[::-1]
    if "text" not in chosen:
        assert index.page(RolloutFilter(**chosen)).matches == len(expected)
        assert [head.rollout for head in index.rollouts(RolloutFilter(**chosen))] == expected[::-1]


def test_a_first_page_imports_no_pandas(folder: RunFolder) -> None:
    """Its import takes longer than all the rest of the first page of a million rollouts."""
    code = f"""
import sys
from areal_lora.obs.report import inspector
from areal_lora.obs.report.inspector import RolloutFilter, RolloutIndex
from areal_lora.run_folder.paths import RunFolder
inspector.ROWS = 7
assert len(RolloutIndex(RunFolder.of({str(folder)!r})).page(RolloutFilter(outcome="solved")).rows) == 25
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_search_that_takes_too_long_states_where_it_continues(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector, "SEARCH_S", -1.0)
    index = RolloutIndex(folder)
    page = index.page(RolloutFilter(text="answer 0 of step 0"))
    assert page.rows == []
    assert page.below is not None
    assert len(all_pages(index, text="answer 0 of step 0")) == 4


def test_a_group_has_all_its_answers_with_their_tokens(folder: RunFolder) -> None:
    index, given = RolloutIndex(folder), step_rollouts(6, adapter="b")
    view = index.group(GroupPlace(adapter="b", step=6, group=1))
    trajectories = given.groups[1].trajectories
    assert [one.head.sample for one in view.rollouts] == [0, 1, 2, 3]
    for one, t in zip(view.rollouts, trajectories, strict=True):
        assert one.tokens == [VOCABULARY[token] for token in t.token_ids]
        assert one.logprobs == t.rollout_logprobs
        assert one.versions == [-1, PROMPT, 5, 3, 6, 3]
    assert view.rollouts[1].head.outcomes == ["solved", "stale"]
    same = {(row["adapter"], row["step"], row["group"]) for row in rows_of(folder) if row["uid"].endswith("problem 6")}
    assert {(other.adapter, other.step, other.group) for other in view.others} == same - {("b", 6, 1)}
    assert index.group(GroupPlace(adapter="b", step=99, group=0)).rollouts == []


def test_a_dropped_group_has_its_reason_and_nothing_of_the_trainer(folder: RunFolder) -> None:
    index = RolloutIndex(folder)
    view = index.group(GroupPlace(adapter="a", step=5, group=3))
    assert [one.head.dropped for one in view.rollouts] == ["scorer: down"] * 4
    assert view.rollouts[1].head.outcomes == ["solved", "dropped"]
    for one in view.rollouts:
        assert math.isnan(one.head.advantage)
        assert (one.head.mismatch, one.trainer_logprobs) == (None, None)
        assert set(one.advantages) == {0.0}
    [before] = index.group(GroupPlace(adapter="a", step=5, group=1)).rollouts[:1]
    assert (before.head.dropped, before.head.mismatch, before.head.advantage) == (None, pytest.approx(0.25), -0.5)


def test_the_ends_are_whole_groups_of_each_adapter(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    overview = RolloutIndex(folder).ends()
    assert (overview.kept, overview.steps, overview.adapters) == (STEPS * 16 + 12, (0, STEPS - 1), ["a", "b"])
    places = [(g.rollouts[0].head.adapter, g.rollouts[0].head.step, len(g.rollouts)) for g in overview.groups]
    assert places == [("a", 0, 4), ("b", 0, 4), ("a", STEPS - 1, 4), ("b", STEPS - 1, 4)]
    monkeypatch.setattr(inspector, "EMBEDDED_TOKENS", 80)
    assert len(RolloutIndex(folder).ends().groups) == 2, "whole groups, as many as fit"


@pytest.mark.parametrize("left", [0, 1000])
def test_a_damaged_file_has_no_rollouts_and_the_others_are_shown(tmp_path: Path, left: int) -> None:
    run = RunFolder(tmp_path)
    keep(run, [step_rollouts(step) for step in range(3)])
    damaged = segments(run.rollouts)[1]
    for path in (damaged.path, run.rollouts / "vocabulary.parquet"):
        path.write_bytes(path.read_bytes()[:left])
    index = RolloutIndex(run)
    assert {head.step for head in index.page(RolloutFilter(), limit=100).rows} == {0, 2}
    view = index.group(GroupPlace(adapter="toy", step=2, group=0))
    assert all(text.startswith("<") for one in view.rollouts for text in one.tokens)
    assert {group.rollouts[0].head.step for group in index.ends().groups} == {0, 2}


def test_an_index_follows_files_that_are_added_merged_removed_and_made_void(tmp_path: Path) -> None:
    rng, folder = random.Random(0), RunFolder(tmp_path)
    index = RolloutIndex(folder)
    assert index.page(RolloutFilter()).rows == []
    assert index.overview().kept == 0
    step = 0
    for _ in range(6):
        writer = RolloutWriter(folder, 500_000, lambda: VOCABULARY)
        step = max(0, step - rng.randrange(3))
        writer.drop("toy", step)
        for _ in range(rng.randrange(1, 12)):
            writer.write(step_rollouts(step))
            step += 1
        writer.close()
        rows = rows_of(folder)
        assert index.overview().kept == len(rows)
        assert [head.rollout for head in index.rollouts(RolloutFilter())] == [row["rollout"] for row in rows]

"""A run that is killed again and again ends bit for bit like one that never was (contract C9)."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_lora.checkpoint.checkpoint_store import version_folder, versions_in
from areal_lora.checkpoint.recover import verify
from areal_lora.checkpoint.state import Manifest, files_of, read_files
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, Correction
from tests.support.distributed.oracle import make_model
from tests.support.distributed.spawn import RanksFailed, run_ranks
from tests.support.sizes import sample
from tests.support.trainer.resume_ranks import PROMPTS, STEPS, Session, crash, live

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

PROFILE = (2,)
# Counted per session: the first save of a session that resumes is that of its first step.
FIRST = "trainer.checkpoint.files_written:1:kill"
"""Of the very first checkpoint."""
FAULTS = [
    FIRST,
    "trainer.batch_received:3:kill",
    "trainer.annotated:2:kill",
    "trainer.learned:3:kill",
    "trainer.checkpoint.files_written:2:kill",
    "trainer.checkpoint.manifest_written:2:kill",
    "trainer.checkpoint.renamed:2:kill",
    "trainer.committed:2:kill",
    "trainer.publish_begun:3:kill",
    "trainer.published:3:kill",
]
CHOSEN = sample(FAULTS, 4, lambda fault: (fault == FIRST,))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tmp = tmp_path_factory.mktemp("resume")
    model = make_model(tmp, "moe")
    folders = {name: tmp / name for name in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    ends = {"whole": world(live, Session(str(folders["whole"]), model, profile=PROFILE), tmp / "s-whole")}
    deaths = []
    for i, fault in enumerate(CHOSEN):
        with pytest.raises(RanksFailed) as failed:
            world(crash, Session(str(folders["killed"]), model, fault), tmp / f"s-{i}")
        deaths.append(str(failed.value))
    ends["killed"] = world(live, Session(str(folders["killed"]), model), tmp / "s-last")
    again = world(live, Session(str(folders["killed"]), model), tmp / "s-again")
    return {"folders": folders, "ends": ends, "deaths": deaths, "again": again}


def corrections(last: int) -> list[Correction]:
    """Of each version: what `DRIFTS` lead to with the hysteresis, by hand."""
    none, truncate, mask = Correction
    after = mask, truncate, truncate, none, truncate, mask
    return [truncate, truncate, *(after[step % 6] for step in range(1, last))]


def world(what: Any, session: Session, store: Path) -> list[Any]:
    store.mkdir()
    return run_ranks(what, 2, store, (session,))


def manifests(folder: Path) -> list[Manifest]:
    root = RunFolder(folder).adapter_checkpoints("a")
    return [verify(version_folder(root, v), AdapterRef(name="a", version=v)) for v in versions_in(root)]


def test_every_session_but_the_last_died_at_its_point(runs: Any) -> None:
    assert len(runs["deaths"]) == len(CHOSEN)
    for death in runs["deaths"]:
        assert "the process died" in death
        assert "no rank was killed" not in death


def test_the_step_that_was_profiled_has_its_phases_and_changes_nothing_of_the_next_tests(runs: Any) -> None:
    [trace] = (runs["folders"]["whole"] / "profile").iterdir()
    assert trace.name == "a-step-2-rank-0.json.gz"
    with gzip.open(trace) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    phases = {"collate", "annotate", "checkpoint_join", "train", "passes", "optimizer", "publish_pack"}
    assert phases | {"forward", "backward"} <= names


def test_adapter_moments_clock_random_numbers_and_prompts_are_equal_bit_for_bit(runs: Any) -> None:
    whole, killed = (manifests(runs["folders"][name]) for name in ("whole", "killed"))
    assert [m.version for m in whole] == [m.version for m in killed] == list(range(STEPS + 1))
    for a, b in zip(whole, killed, strict=True):
        assert a.files == b.files, f"weights or moments of v{a.version} differ"  # names, sizes and checksums
        assert (a.clock, a.random, a.ledger, a.correction) == (b.clock, b.random, b.ledger, b.correction)
    assert runs["ends"]["whole"][0]["random"] == runs["ends"]["killed"][0]["random"]


def test_the_comparison_can_fail(runs: Any) -> None:
    whole = manifests(runs["folders"]["whole"])
    assert len({m.files[0].blake2b for m in whole}) == len({m.random[0].host for m in whole}) == STEPS + 1
    assert len({m.ledger for m in whole}) == STEPS + 1
    assert [m.correction for m in whole] == corrections(STEPS)
    names = [f"{role}rank-000{rank}.safetensors" for rank in range(2) for role in ("", "critic-", "reference-")]
    assert [entry.name for entry in whole[0].files] == names


def test_critic_and_reference_are_part_of_what_is_compared(runs: Any) -> None:
    """The critic moves in each step and counts its own; the reference is renewed every third version."""
    whole = manifests(runs["folders"]["whole"])
    assert [m.companions["critic"].step for m in whole] == list(range(STEPS + 1))
    assert {(m.companions["critic"].spec.rank, m.companions["critic"].spec.value_head) for m in whole} == {(4, True)}
    sums = {role: [files_of(m, role)[0].blake2b for m in whole] for role in ("critic", "reference")}
    assert len(set(sums["critic"])) == STEPS + 1
    assert sums["reference"] == [sums["reference"][v - v % 3] for v in range(STEPS + 1)]
    assert len(set(sums["reference"])) == 1 + STEPS // 3
    root = RunFolder(runs["folders"]["whole"]).adapter_checkpoints("a")
    for m in whole:
        mine, reference = (
            read_files([version_folder(root, v) / e.name for e in files_of(m, role)])["weight"]
            for v, role in ((m.version - m.version % 3, ""), (m.version, "reference"))
        )
        assert mine.keys() == reference.keys()
        assert all(np.array_equal(reference[name], values) for name, values in mine.items())


def test_a_crash_repeats_at_most_one_step_with_the_same_prompts(runs: Any) -> None:
    sessions = re.split(r"(?m)^session ", (runs["folders"]["killed"] / "journal-0").read_text())[1:]
    assert len(sessions) == len(CHOSEN) + 2
    taken: dict[int, str] = {}
    learned = -1
    for text in sessions:
        begun, *lines = text.splitlines()
        assert int(begun) >= learned, "more than one step was lost"
        for line in lines:
            if line.startswith("step "):
                _, step, prompts = line.split(" ", 2)
                assert taken.setdefault(int(step), prompts) == prompts
            elif line.startswith("learned "):
                learned = max(learned, int(line.split()[1]))
    assert learned == STEPS - 1
    assert sorted(taken) == list(range(STEPS))
    whole = (runs["folders"]["whole"] / "journal-0").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in whole if line.startswith("step ")] == [taken[s] for s in range(STEPS)]


def test_the_records_show_one_line_per_step(runs: Any) -> None:
    """A `ResumeRecord` voids those beyond the version that a session resumes from."""
    shown: list[int] = []
    for line in (runs["folders"]["killed"] / "journal-0").read_text().splitlines():
        what, _, number = line.partition(" ")
        if what == "session":
            shown = [step for step in shown if step < int(number)]
        if what == "record":
            shown.append(int(number))
    assert shown == list(range(STEPS))


def test_pending_evaluations_are_requested_again(runs: Any) -> None:
    due = {0, *range(3, STEPS, 3), STEPS}
    sessions = (runs["folders"]["killed"] / "journal-0").read_text().split("session ")[1:]
    for session in sessions:
        begun = int(session.partition("\n")[0])
        asked = Counter(int(line.split()[1]) for line in session.splitlines() if line.startswith("evaluate "))
        assert {version for version in due if version <= begun} <= asked.keys() <= due
        assert set(asked.values()) <= {1}
    assert max(int(session.partition("\n")[0]) for session in sessions) == STEPS


def test_every_step_is_committed_after_the_last_session(runs: Any) -> None:
    journal = (runs["folders"]["killed"] / "journal-0").read_text().splitlines()
    commits = Counter(int(line.split()[1]) for line in journal if line.startswith("commit "))
    assert commits[STEPS] == 1
    assert max(commits.values()) == 1, "a version was written twice"


def test_a_run_whose_steps_are_done_ends_at_once(runs: Any) -> None:
    assert [end["begun"] for end in runs["again"]] == [STEPS] * 2
    assert runs["again"][0]["random"] == runs["ends"]["killed"][0]["random"]


@pytest.fixture(scope="module")
def changed(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The finished run with other settings, one after the other."""
    tmp = tmp_path_factory.mktemp("changed")
    folder = runs["folders"]["whole"]
    path = str(folder.parent / "moe")
    tp2, pp2 = ((("world_size", 2), (kind, 2)) for kind in ("tp", "pp"))
    ends = {
        "tp2": world(live, Session(str(folder), path, sizes=tp2, steps=STEPS + 1), tmp / "tp2"),
        "pp2": world(live, Session(str(folder), path, sizes=pp2, steps=STEPS + 2), tmp / "pp2"),
    }
    with pytest.raises(RanksFailed) as failed:
        world(live, Session(str(folder), path, rank=8, steps=STEPS + 3), tmp / "rank")
    root = RunFolder(folder).adapter_checkpoints("a")
    (root / f"v{STEPS + 2:06d}" / "rank-0001.safetensors").write_bytes(b"torn")
    ends["fallback"] = world(live, Session(str(folder), path, sizes=pp2, steps=STEPS + 2), tmp / "fallback")
    return {"ends": ends, "refusal": str(failed.value), "manifests": manifests(folder), "root": root}


def test_other_layouts_and_more_steps_resume_from_the_same_checkpoint(changed: Any) -> None:
    assert [[e["begun"], e["version"]] for e in changed["ends"]["tp2"]] == [[STEPS, STEPS + 1]] * 2
    assert [[e["begun"], e["version"]] for e in changed["ends"]["pp2"]] == [[STEPS + 1, STEPS + 2]] * 2
    wanted = corrections(STEPS + 2)
    assert [m.correction for m in changed["manifests"]] == [wanted[m.version] for m in changed["manifests"]]
    assert [e["correction"] for e in changed["ends"]["tp2"]] == [corrections(STEPS + 1)[-1]] * 2
    last = changed["manifests"][-1]
    assert (last.layout["pp"], last.clock.step, last.clock.total_steps) == (2, STEPS + 2, STEPS + 2)
    assert last.ledger == b"%d" % ((STEPS + 2) * PROMPTS)


def test_another_rank_of_the_adapter_is_refused(changed: Any) -> None:
    assert "ConfigError: adapters.0.rank: it is 8, but " in changed["refusal"]
    assert "was trained with 4" in changed["refusal"]


def test_a_torn_newest_one_costs_one_step_and_is_put_aside(changed: Any) -> None:
    assert [e["begun"] for e in changed["ends"]["fallback"]] == [STEPS + 1] * 2
    assert (changed["root"] / f"broken-v{STEPS + 2:06d}").is_dir()
    assert changed["manifests"][-1].version == STEPS + 2

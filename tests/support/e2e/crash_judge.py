"""Whether a run that was killed many times lost, repeated or invented anything.

Judges by what is on the disk: the ledger through plain ``sqlite3``, checkpoints and metrics as plain JSON,
and the diary of what every trainer rank learned (`crash_child`). Nothing of the package's own reading code.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areal_lora.config.models import Config
from areal_lora.data.prompts import locate
from areal_lora.tasks.datasets import load_samples
from tests.support.e2e.crash_child import DIARY
from tests.support.e2e.crash_run import CrashRun, Kill

ISSUED, RUNNING, DONE, LEASED, CONSUMED, DROPPED = range(6)
ISSUED_AGAIN = ("stale", "rolled_back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What one kill cost: optimizer steps of any adapter taken twice, and seconds until the next step was taken."""

    kill: Kill
    lost_steps: int
    recovery_s: float | None


def judge(run: CrashRun) -> list[Damage]:
    """Raises AssertionError for the first thing that is wrong."""
    config = Config.model_validate_json((run.folder / "config.json").read_text())
    diary = [json.loads(line) for line in (run.folder / DIARY).read_text().splitlines()]
    if run.workers:
        check_workers(run)
    lost = [0 for _ in run.kills]
    for name in run.seeds:
        its = [entry for entry in diary if entry["adapter"] == name]
        lineage = lineage_of(its, config)
        check_ledger(run, config, name, lineage)
        check_files(run, config, name)
        lost = [max(most, mine) for most, mine in zip(lost, lost_steps(run, its), strict=True)]
    return [
        Damage(kill=kill, lost_steps=steps, recovery_s=recovery_s(kill, diary))
        for kill, steps in zip(run.kills, lost, strict=True)
    ]


def lineage_of(diary: Sequence[dict[str, Any]], config: Config) -> dict[int, set[str]]:
    """The groups of each step that the final adapter has learned from: by step, those that were learned last."""
    lineage: dict[int, set[str]] = {}
    by: dict[tuple[int, int], set[str]] = {}
    size, eta = config.adapters[0].sampling.prompts_per_step, config.rollout.max_staleness
    for entry in (e for e in diary if e["what"] == "learnt"):
        uids, version = set(entry["uids"]), entry["version"]
        assert len(uids) == len(entry["uids"]) == size, f"step {version} learned from {entry['uids']}"
        for tokens in entry["tokens"]:
            assert all(0 <= version - v <= eta for v in tokens), f"step {version} learned from tokens of {set(tokens)}"
        same = by.setdefault((entry["life"], version), uids)
        assert same == uids, f"step {version}: the ranks learned from different groups"
        lineage[version] = uids
    assert sorted(lineage) == list(range(config.run.steps))
    seen = Counter(uid for uids in lineage.values() for uid in uids)
    twice = [uid for uid, n in seen.items() if n > 1]
    assert not twice, f"learned in two committed steps: {twice}"
    return lineage


def check_ledger(run: CrashRun, config: Config, name: str, lineage: dict[int, set[str]]) -> None:
    """The book says what was learned; every prompt is consumed, dropped for a reason, or live, once."""
    with sqlite3.connect(f"file:{run.folder / 'ledger.sqlite'}?mode=ro", uri=True) as book:
        columns = "position, issue, state, version, step, reason"
        rows = book.execute(f"SELECT {columns} FROM groups WHERE adapter = ? ORDER BY seq", (name,)).fetchall()
        [(head,)] = book.execute("SELECT head FROM adapters WHERE adapter = ?", (name,)).fetchall()
    book.close()
    samples = load_samples(config.adapters[0].task, "train")
    consumed = defaultdict(set)
    issues = defaultdict(list)
    for position, issue, state, version, step, reason in rows:
        epoch, index = locate(position, len(samples), run.seeds[name])
        issues[position].append((issue, state, version, reason))
        if state == CONSUMED:
            consumed[step].add(f"{epoch}:{samples[index].uid}")
    assert consumed == lineage, f"ledger and trainer differ in {differing(consumed, lineage)}"
    states = Counter(row[2] for row in rows)
    live = sum(states[state] for state in (ISSUED, RUNNING, DONE, LEASED))
    assert json.loads(head)["issued"] == states[CONSUMED] + states[DROPPED] + live
    assert states[LEASED] == 0, "the last step was not committed"
    assert sorted(issues) == list(range(json.loads(head)["next_position"])), "a position was left out"
    for position, known in issues.items():
        assert [k[0] for k in known] == list(range(1, len(known) + 1)), f"issues of position {position}: {known}"
        assert all(state == DROPPED and reason in ISSUED_AGAIN for _, state, _, reason in known[:-1]), known
        _, state, version, reason = known[-1]
        if state == DROPPED:
            # Only at the very end there was no room any more to issue it again.
            late = version + config.rollout.max_staleness + 1 >= config.run.steps - 2
            assert reason
            assert late or reason not in ISSUED_AGAIN, f"position {position} was lost: {known}"


def check_workers(run: CrashRun) -> None:
    """Workers ended, and of their groups only the samples that ran there were repeated."""
    log = (run.folder / "logs" / "controller-0.log").read_text()
    assert any(run.marks.iterdir()), "no worker ended"
    assert re.search(r"sample \S+ is repeated", log), "no sample was repeated"


def differing(one: dict[int, set[str]], other: dict[int, set[str]]) -> dict[int, tuple[set[str], set[str]]]:
    return {
        step: (one.get(step, set()), other.get(step, set()))
        for step in sorted({*one, *other})
        if one.get(step, set()) != other.get(step, set())
    }


def check_files(run: CrashRun, config: Config, name: str) -> None:
    """The newest checkpoint is of the last version, nothing half-written is left, every step has its record."""
    folder = run.folder / "checkpoints" / name
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert names[-1] == f"v{config.run.steps:06d}"
    assert not [name for name in names if not name.startswith("v")], f"left over: {names}"
    manifest = json.loads((folder / names[-1] / "manifest.json").read_text())["manifest"]
    assert (manifest["version"], manifest["clock"]["step"]) == (config.run.steps, config.run.steps)
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [r["version"] for r in records if r["kind"] == "step" and r["adapter"] == name]
    assert set(steps) == set(range(config.run.steps))


def lost_steps(run: CrashRun, diary: Sequence[dict[str, Any]]) -> Iterator[int]:
    """By kill, how many steps of the adapter whose ``diary`` it is had to be taken again."""
    if run.victim != "trainer":
        learnt = [e["version"] for e in diary if e["what"] == "learnt" and e["rank"] == 0]
        assert learnt == list(range(len(learnt))), f"the trainer went on in another order: {learnt}"
        yield from (0 for _ in run.kills)
        return
    reached = 0
    for kill in run.kills:
        mine = [e for e in diary if e["life"] == kill.life]
        later = [e for e in diary if e["life"] > kill.life]
        learnt = [e["version"] for e in mine if e["what"] == "learnt" and e["rank"] == 0]
        assert learnt == sorted(set(learnt)), f"life {kill.life} learned {learnt}"
        reached = max([reached, *(e["version"] + 1 for e in mine if e["what"] == "learnt")])
        if not later:  # it had made its last step
            yield 0
            continue
        goes_on = later[0]["version"]  # announced or learned first: where that life began
        lost, reached = max(0, reached - goes_on), min(reached, goes_on)
        assert lost <= 1 + run.behind, f"{kill.point} ({kill.times}): {lost} steps lost"
        yield lost


def recovery_s(kill: Kill, diary: Sequence[dict[str, Any]]) -> float | None:
    after = [e["at"] for e in diary if e["what"] == "learnt" and e["at"] > kill.at]
    return min(after) - kill.at if after else None

"""What resumes and repeats void, against a table of everything that is simply overwritten and filtered."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from areal_lora.obs.metrics.reader import VoidRecords, iter_metrics, read_metrics
from areal_lora.obs.metrics.records import (
    CheckpointRecord,
    EvalRecord,
    MembersRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    StepRecord,
)
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder

KINDS = (StepRecord, PublishRecord, CheckpointRecord, EvalRecord)


def place(record: Record) -> int:
    return record.step if isinstance(record, StepRecord) else record.version


def table(records: list[Record]) -> dict[object, Record]:
    """Those that count: the last of each key, without what a later resume of the adapter goes back behind."""
    found: dict[object, Record] = {}
    for record in records:
        if isinstance(record, ResumeRecord):
            found = {
                key: r
                for key, r in found.items()
                if r.adapter != record.adapter or place(r) <= record.version - isinstance(r, StepRecord)
            }
            continue
        found[type(record), record.adapter, place(record), getattr(record, "tag", "")] = record
    return found


def random_run(rng: random.Random) -> list[Record]:
    """Two adapters that continue, resume, repeat versions, and are evaluated late and out of order."""
    at, records, clock = {"a": 0, "b": 0}, list[Record](), 0.0
    for _ in range(rng.randint(1, 60)):
        name = rng.choice("ab")
        clock += 1.0
        version = at[name]
        if rng.random() < 0.12:
            at[name] = rng.randint(0, version)
            records.append(ResumeRecord(version=at[name], time_s=clock, adapter=name))
            records.append(PublishRecord(version=at[name], total_ms=clock, adapter=name))
            continue
        records.append(StepRecord(step=version, version=version, time_s=clock, adapter=name))
        records.append(PublishRecord(version=version + 1, total_ms=clock, adapter=name))
        records.append(CheckpointRecord(version=version + 1, write_s=clock, adapter=name))
        tag = rng.choice(["", "late"])
        old = rng.randint(0, version + 1)
        records.append(EvalRecord(version=old, step=old, accuracy=clock, n=1, adapter=name, tag=tag))
        at[name] += rng.random() < 0.95
    return records


def test_random_runs_are_read_like_a_table_says(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for case in range(150):
        folder, records = tmp_path / str(case), random_run(rng)
        folder.mkdir()
        RunFolder(folder).metrics.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records))
        want = list(table(records).values())
        run = read_metrics(folder)
        for kind, got in zip(KINDS, (run.steps, run.publishes, run.checkpoints, run.evals), strict=True):
            rows = [r for r in want if isinstance(r, kind)]
            assert sorted(got, key=repr) == sorted(rows, key=repr)
            assert [place(r) for r in got] == sorted(place(r) for r in rows)
        streamed = list(iter_metrics(folder))
        assert [r for r in records if r in streamed] == streamed, "not in the order written"


def test_memory_grows_with_resumes_and_not_with_records() -> None:
    def step(version: int) -> StepRecord:
        return StepRecord(adapter="a", step=version, version=version, time_s=0.0)

    undone = VoidRecords()
    for number in range(10_000):
        undone.note(number, step(number))
        undone.note(number, MembersRecord(adapter="a", version=number, servers=1))
    assert undone.nothing
    for number in range(10_000, 10_100):
        undone.note(number, ResumeRecord(adapter="a", version=10_100 - number, time_s=0.0))
    assert sum(len(entries) for entries in undone._resumes.values()) == 1
    assert not undone._last
    assert [n for n in range(10_000) if undone.holds(n, step(n))] == [0]


def test_what_is_appended_while_the_file_is_read_waits_for_the_next_time(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(StepRecord(step=0, version=0, time_s=1.0))
        reading = iter_metrics(tmp_path)
        first = next(reading)
        writer.write(ResumeRecord(version=0, time_s=1.0))
        writer.write(StepRecord(step=0, version=0, time_s=2.0))
        assert [first, *reading] == [StepRecord(step=0, version=0, time_s=1.0)]
        assert [r.time_s for r in iter_metrics(tmp_path) if isinstance(r, StepRecord)] == [2.0]

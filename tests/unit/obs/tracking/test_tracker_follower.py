"""What a tracker gets: each valid record once, over kills of the command, while the file grows and the run resumes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import (
    CheckpointRecord,
    EvalRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    StepRecord,
    position,
    scalars,
)
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.tracking.tracker import HOLD_S, MetricsFollower, MetricsRow
from areal_lora.run_folder.paths import RunFolder
from tests.support.clocks import Clock
from tests.support.obs.records import step_record

SEED = 57


def line(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def append(folder: RunFolder, *records: Record) -> None:
    with folder.metrics.open("ab") as file:
        file.writelines(map(line, records))


def step(index: int, adapter: str = "a", loss: float = 0.0) -> StepRecord:
    return step_record(step=index, version=index, time_s=2.0 * index, adapter=adapter, loss=loss)


def saved(version: int, adapter: str = "a") -> CheckpointRecord:
    return CheckpointRecord(version=version, write_s=0.1, adapter=adapter)


def resume(version: int, adapter: str = "a") -> ResumeRecord:
    return ResumeRecord(version=version, time_s=2.0 * version, adapter=adapter)


def records(rows: Iterator[MetricsRow]) -> list[Record]:
    return [row.record for row in rows]


def test_a_step_waits_for_its_checkpoint_and_what_follows_waits_with_it(tmp_path: Path) -> None:
    folder, clock = RunFolder(tmp_path), Clock()
    follower = MetricsFollower(folder, clock=clock)
    assert records(follower.read_new()) == [], "no file yet"
    publish = PublishRecord(version=0, total_ms=1.0, adapter="a")
    other = step(0, "b")
    append(folder, publish, step(0), other, saved(1, "b"))
    assert records(follower.read_new()) == [publish]
    append(folder, saved(1), step(1))
    assert records(follower.read_new()) == [step(0), other, saved(1, "b"), saved(1)]
    append(folder, CheckpointRecord(version=2, write_s=0.1, adapter="a", failed=True), saved(2, "b"))
    assert records(follower.read_new()) == []
    assert records(follower.read_new(everything=True))[0] == step(1)
    assert records(follower.read_new(everything=True)) == []


def test_a_step_waits_until_a_record_is_two_minutes_newer(tmp_path: Path) -> None:
    folder, clock = RunFolder(tmp_path), Clock()
    follower = MetricsFollower(folder, clock=clock)
    append(folder, step(0))
    assert records(follower.read_new()) == []
    clock.now = HOLD_S - 1
    append(folder, step(1))
    assert records(follower.read_new()) == []
    clock.now = 2 * HOLD_S
    assert records(follower.read_new()) == [], "the run may start again, and a resume may undo both"
    append(folder, step(2))
    assert records(follower.read_new()) == [step(0), step(1)]


def test_rare_checkpoints_of_slow_steps_keep_the_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    """A checkpoint every 20 steps of a minute; killed after step 38. Two minutes of hold would send 18 steps twice."""
    folder, clock, sent = RunFolder(tmp_path), Clock(), list[Record]()
    follower = MetricsFollower(folder, clock=clock, behind=19)

    def run(steps: range, loss: float) -> None:
        for index in steps:
            clock.now += 60.0
            append(folder, msgspec.structs.replace(step(index, loss=loss), step_s=60.0))
            append(folder, *([saved(index + 1)] if (index + 1) % 20 == 0 else []))
            sent.extend(records(follower.read_new()))

    run(range(39), 1.0)
    append(folder, resume(20))
    run(range(20, 45), 2.0)
    steps = [(record.step, record.metrics["train/loss"]) for record in sent if isinstance(record, StepRecord)]
    assert steps == [(index, 1.0 if index < 20 else 2.0) for index in range(40)]


def test_steps_of_an_adapter_that_never_saves_end_the_wait_of_the_others(tmp_path: Path) -> None:
    folder, clock = RunFolder(tmp_path), Clock()
    follower = MetricsFollower(folder, clock=clock, behind=19)
    failed = msgspec.structs.replace(step(0, "b"), step_s=60.0)
    append(folder, failed)
    assert records(follower.read_new()) == []
    clock.now = HOLD_S + 19 * 60.0 - 1
    append(folder, saved(20))
    assert records(follower.read_new()) == []
    clock.now += 1
    append(folder, saved(21))
    assert records(follower.read_new()) == [failed, saved(20), saved(21)]


@pytest.mark.parametrize("only", ["a", None])
def test_scalars_have_the_tags_and_values_of_tensorboard(tmp_path: Path, only: str | None) -> None:
    folder = RunFolder(tmp_path)
    evaluation = EvalRecord(version=1, step=1, accuracy=0.5, n=4, adapter="a")
    with MetricsWriter(folder, only) as writer:
        for record in (step(0, loss=0.25), saved(1), evaluation, *([] if only else [step(0, "b", 0.5), saved(1, "b")])):
            writer.write(record)
    events, found = EventAccumulator(str(folder.tensorboard)), dict[str, list[tuple[int, float]]]()
    events.Reload()
    for row in MetricsFollower(folder, only=only).read_new():
        for tag, value in scalars(row.record).items():
            found.setdefault(tag, []).append((position(row.record), pytest.approx(value)))
    assert found == {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert ("train/loss" in found) == (only is not None)


def test_a_step_that_a_crash_undid_is_never_sent(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    follower = MetricsFollower(folder)
    append(folder, step(0), saved(1), step(1, loss=1.0))
    assert records(follower.read_new()) == [step(0), saved(1)]
    append(folder, resume(1))
    assert records(follower.read_new()) == [resume(1)]
    append(folder, step(1, loss=2.0), saved(2))
    assert records(follower.read_new()) == [step(1, loss=2.0), saved(2)]


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    follower = MetricsFollower(folder)
    text = line(saved(1))
    with folder.metrics.open("ab", buffering=0) as file:
        file.write(text + text[:20])
        assert len(records(follower.read_new())) == 1
        file.write(text[20:])
    # The second one replaces the first one, which is sent.
    assert [row.line for row in follower.read_new()] == [2]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    append(folder, saved(1))
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind":"step"}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2"):
        list(MetricsFollower(folder).read_new())


def test_the_time_is_that_of_the_last_record_that_has_one_also_in_a_second_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    evaluation = EvalRecord(version=1, step=1, accuracy=0.5, n=4, adapter="a")
    append(folder, saved(1), step(0), step(1), saved(2), evaluation)
    whole = [(row.line, row.time_s) for row in MetricsFollower(folder).read_new()]
    assert whole == [(1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert [(row.line, row.time_s) for row in MetricsFollower(folder, sent=3).read_new()] == whole[3:]


def history(rng: random.Random, steps: int) -> Iterator[Record]:
    """What the trainer writes for two adapters that checkpoint every step, with crashes between any two records."""
    done = {"a": 0, "b": 0}
    while min(done.values()) < steps:
        name = rng.choice(sorted(done))
        yield step(done[name], name, rng.random())
        if rng.random() < 0.2:
            yield from (resume(version, adapter) for adapter, version in done.items())
            continue
        done[name] += 1
        yield saved(done[name], name)
        yield PublishRecord(version=done[name], total_ms=rng.random(), adapter=name)
        if rng.random() < 0.1:
            yield from (resume(version, adapter) for adapter, version in done.items())
            yield from (PublishRecord(version=v, total_ms=rng.random(), adapter=n) for n, v in done.items())


def test_random_runs_arrive_whole_over_crashes_of_the_run_and_kills_of_the_command(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    for trial in range(20):
        folder = RunFolder(tmp_path / str(trial))
        folder.path.mkdir()
        text = b"".join(map(line, history(rng, 12)))
        follower, got, sent, at = MetricsFollower(folder), list[MetricsRow](), 0, 0
        while at < len(text):
            more = rng.randrange(1, 900)
            with folder.metrics.open("ab") as file:
                file.write(text[at : at + more])
            at += more
            for row in follower.read_new(everything=at >= len(text)):
                if rng.random() < 0.02:
                    break  # killed before this row was sent
                got.append(row)
                sent = row.line
            else:
                continue
            follower = MetricsFollower(folder, sent)
        got += MetricsFollower(folder, sent).read_new(everything=True)
        assert [row.line for row in got] == sorted({row.line for row in got})
        counted = [record for record in iter_metrics(folder) if not isinstance(record, PublishRecord)]
        assert [row.record for row in got if not isinstance(row.record, PublishRecord)] == counted
        last = {(r.adapter, r.version): r for r in iter_metrics(folder) if isinstance(r, PublishRecord)}
        publishes = [row.record for row in got if isinstance(row.record, PublishRecord)]
        assert {(r.adapter, r.version): r for r in publishes} == last
    assert Counter(type(record) for record in counted)[ResumeRecord] > 0, "no crash in the last trial"

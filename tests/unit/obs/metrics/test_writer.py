"""Records are stored as written, a torn line is cut, TensorBoard agrees."""

import json
import math
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]

from areal_lora.errors import RecordError
from areal_lora.obs.metrics.reader import MetricsTail, read_metrics
from areal_lora.obs.metrics.records import AdapterStateRecord, CheckpointRecord, EvalRecord, ResumeRecord, SampleRecord
from areal_lora.obs.metrics.writer import TEXT_CHARS, MetricsWriter, cut_middle
from areal_lora.run_folder.events import JsonlSink
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.obs.records import EVAL, PUBLISH, STEP, step_record


def test_every_record_comes_back_as_written(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for record in (STEP, PUBLISH, EVAL):
            writer.write(record)
            # Another process sees the whole line at once, before the writer is closed.
            assert RunFolder(tmp_path).metrics.read_bytes().endswith(msgspec.json.encode(record) + b"\n")
    metrics = read_metrics(tmp_path)
    assert (metrics.steps, metrics.publishes, metrics.evals) == ([STEP], [PUBLISH], [EVAL])
    rows = [json.loads(line) for line in RunFolder(tmp_path).metrics.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [row["kind"] for row in rows] == ["step", "publish", "eval"]
    assert rows[0]["staleness"] == {"0": 7, "2": 1}


def test_a_long_answer_of_an_evaluation_keeps_both_ends(tmp_path: Path) -> None:
    answer = "begin " + "thinking " * 20_000 + " #### 42"
    sample = SampleRecord(prompt="p", completion=answer, gold="42", reward=1.0)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(EvalRecord(version=0, step=0, accuracy=1.0, n=1, samples=[sample]))
    assert RunFolder(tmp_path).metrics.stat().st_size < 2 * TEXT_CHARS
    text = read_metrics(tmp_path).evals[0].samples[0].completion
    assert text.startswith("begin thinking")
    assert text.endswith("thinking  #### 42")
    assert f"\n[... {len(answer) - TEXT_CHARS} characters left out ...]\n" in text
    assert len(text) < TEXT_CHARS + 100


@pytest.mark.parametrize("limit", [7, 8])
def test_what_is_cut_and_what_is_kept_make_the_whole(limit: int) -> None:
    text = "".join(chr(0x1F600 + i) for i in range(20))
    assert cut_middle(text[:limit], limit) == text[:limit]
    head, mark, tail = cut_middle(text, limit).split("\n")
    assert (len(head) + len(tail), mark) == (limit, f"[... {20 - limit} characters left out ...]")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert abs(len(head) - len(tail)) <= 1


def test_tensorboard_has_the_state_of_each_adapter_as_a_number(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for name, phase, version in (("a", "active", 0), ("b", "active", 0), ("a", "done", 8), ("b", "failed", 3)):
            writer.write(AdapterStateRecord(adapter=name, state=AdapterPhase(phase), version=version))
    events = EventAccumulator(str(RunFolder(tmp_path).tensorboard))
    events.Reload()
    seen = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert seen == {"a/state": [(0, 1.0), (8, 3.0)], "b/state": [(0, 1.0), (3, 4.0)]}


@pytest.mark.parametrize(("only", "tag"), [("toy", "train/reward_mean"), (None, "toy/train/reward_mean")])
def test_tags_of_the_only_adapter_have_no_name(tmp_path: Path, only: str | None, tag: str) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        with MetricsWriter(folder, only) as writer:
            writer.write(STEP)
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    tags = [found for found in events.Tags()["scalars"] if found.endswith("train/reward_mean")]
    assert tags == [tag]


@pytest.mark.parametrize("reader", [EventAccumulator, plugin_event_accumulator.EventAccumulator])
def test_steps_that_a_resume_voids_are_not_in_tensorboard(
    tmp_path: Path, reader: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the library's readers the second one is the server's own; each file is a process of the trainer."""
    # Files of one second and process are sorted by this number as text: 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    folder, loss = RunFolder(tmp_path), 0.0
    for first, end in ((0, 30), (20, 35), (33, 40)):
        with MetricsWriter(folder, "toy") as writer:
            if first:
                writer.write(ResumeRecord(adapter="toy", version=first, time_s=1.0))
            for step in range(first, end):
                loss += 1.0
                writer.write(step_record(adapter="toy", step=step, version=step, time_s=1.0, loss=loss))
                writer.write(CheckpointRecord(adapter="toy", version=step + 1, write_s=loss))
                if step % 10 == 9:
                    late = 2  # steps more may run before a version is evaluated
                    writer.write(EvalRecord(adapter="toy", version=step + 1, step=step + 1 + late, accuracy=loss, n=1))
    events = reader(str(folder.tensorboard))
    events.Reload()

    def curve(tag: str) -> list[tuple[int, float]]:
        if reader is EventAccumulator:
            return [(e.step, e.value) for e in events.Scalars(tag)]
        return [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)]

    # 30 steps, of which 20 stay; 15 from 20 on, of which 13 stay; 7 from 33 on.
    kept = [float(n) for n in [*range(1, 21), *range(31, 44), *range(46, 53)]]
    assert curve("train/loss") == list(enumerate(kept))
    assert sorted(curve("checkpoint/write_s")) == list(enumerate(kept, 1))
    assert sorted(curve("eval/accuracy")) == [(12, 10.0), (22, 20.0), (32, 40.0), (42, 52.0)]


def test_a_resume_of_one_adapter_of_several_removes_no_points_of_the_others(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with MetricsWriter(folder) as writer:
        for step, adapter in enumerate("abababab"):
            writer.write(step_record(adapter=adapter, step=step, version=step, time_s=1.0, loss=1.0))
    with MetricsWriter(folder) as writer:
        writer.write(ResumeRecord(adapter="a", version=2, time_s=1.0))
        writer.write(step_record(adapter="a", step=2, version=2, time_s=1.0, loss=2.0))
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert [e.step for e in events.Scalars("b/train/loss")] == [1, 3, 5, 7]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    hard = {"name": "hard", "order": 1, "accuracy": 0.1, "pass_at": {1: 0.1, 4: 0.5}}
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for record in (STEP, PUBLISH, EVAL, msgspec.structs.replace(EVAL, **hard)):
            writer.write(record)
    events = EventAccumulator(str(RunFolder(tmp_path).tensorboard))
    events.Reload()
    seen = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert seen["toy/train/reward_mean"] == [(3, 0.5)]
    assert seen["toy/train/rollout_tokens_per_s"] == [(3, 4000.0)]
    assert seen["toy/time/train_s"] == [(3, pytest.approx(0.8))]
    assert seen["toy/train/max_staleness"] == [(3, 2.0)]
    assert seen["toy/train/mean_lag"] == [(3, 0.25)]
    assert seen["toy/extra/capped_fraction"] == [(3, 0.25)]
    assert seen["toy/publish/total_ms"] == [(4, 20.0)]
    assert seen["toy/publish/wire_ms"] == [(4, 2.5)]
    assert seen["toy/eval/accuracy"] == [(4, 0.75)]
    assert seen["toy/eval/reward_mean"] == [(4, 0.5)]
    assert seen["toy/eval/unscored"] == [(4, 1.0)]
    assert seen["toy/eval/held-out/accuracy"] == [(4, 0.75)]
    assert seen["toy/eval/hard/pass@4"] == [(4, 0.5)]
    assert "toy/eval/hard/majority" not in seen
    assert "toy/train/loss" not in seen


def test_values_that_are_not_finite_come_back_as_none(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(step_record(step=0, version=0, time_s=1.0, loss=math.nan, grad_norm=math.inf, lr=0.1))
    step = read_metrics(tmp_path).steps[0]
    assert step.metrics == {"train/loss": None, "train/grad_norm": None, "train/lr": 0.1}


def test_a_resumed_writer_cuts_a_torn_line_and_the_last_repeat_counts(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(step_record(step=0, version=0, time_s=1.0, reward_mean=0.1))
        writer.write(step_record(step=1, version=1, time_s=2.0, reward_mean=0.2))
    with RunFolder(tmp_path).metrics.open("ab") as file:
        file.write(b'{"kind":"step","step":2,"ver')
    assert [s.step for s in read_metrics(tmp_path).steps] == [0, 1]
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(step_record(step=1, version=1, time_s=3.0, reward_mean=0.9))
        writer.write(step_record(step=1, version=1, time_s=3.0, reward_mean=0.4, adapter="other"))
    assert [(s.adapter, s.step, s.reward_mean) for s in read_metrics(tmp_path).steps] == [
        ("", 0, 0.1),
        ("", 1, 0.9),
        ("other", 1, 0.4),
    ]


def test_a_full_disk_leaves_no_half_line_in_the_middle(tmp_path: Path) -> None:
    """The kernel takes a part of a line before it reports a full disk."""
    path, soft_hard = RunFolder(tmp_path).metrics, resource.getrlimit(resource.RLIMIT_FSIZE)
    sink = JsonlSink(path)
    sink.write(msgspec.json.encode(STEP))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, soft_hard[1]))
    try:
        with pytest.raises(RecordError, match=r"metrics\.jsonl: a record cannot be written: File too large"):
            sink.write(msgspec.json.encode(PUBLISH))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    sink.write(msgspec.json.encode(PUBLISH))
    sink.close()
    assert MetricsTail(RunFolder(tmp_path)).read_new() == [STEP, PUBLISH]

"""Records come back as written, torn and repeated lines are dealt with, TensorBoard agrees."""

import json
import math
import resource
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from areal_lora.errors import ConfigError, RecordError
from areal_lora.obs.metrics import records as metrics_module
from areal_lora.obs.metrics.records import (
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    CheckpointRecord,
    EvalRecord,
    MetricsTail,
    MetricsWriter,
    PublishRecord,
    ResumeRecord,
    RolloutSampleRecord,
    SampleRecord,
    StepRecord,
    read_metrics,
)
from areal_lora.obs.metrics.samples import sample_files, sample_lines
from areal_lora.run_folder.jsonl import BLOCK_BYTES, JsonlSink

STEP = StepRecord(
    step=3,
    version=3,
    time_s=9.5,
    adapter="toy",
    reward_mean=0.5,
    rollout_tokens_per_s=4000.0,
    train_s=0.8,
    staleness={0: 7, 2: 1},
    dropped={"stale": 2},
    extra={"capped_fraction": 0.25},
)
PUBLISH = PublishRecord(version=4, total_ms=20.0, adapter="toy", phases_ms={"pack": 1.5, "wire": 2.5, "ack": 18.0})
EVAL = EvalRecord(
    version=4,
    step=4,
    accuracy=0.75,
    n=8,
    reward_mean=0.5,
    unscored=1,
    adapter="toy",
    samples=[SampleRecord(prompt="p\n", completion="é\u2028", gold="1", reward=1.0)],
)
SAMPLE = RolloutSampleRecord(
    step=3, prompt="a\r\nb", completion="</script>", reward=0.0, adapter="toy", versions=[2, 3]
)


def test_every_record_comes_back_as_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for record in (STEP, PUBLISH, EVAL, SAMPLE):
            writer.write(record)
            # Another process sees the whole line at once, before the writer is closed.
            path = sample_files(tmp_path)[0] if record is SAMPLE else tmp_path / METRICS_FILE
            assert path.read_bytes().endswith(msgspec.json.encode(record) + b"\n")
    metrics = read_metrics(tmp_path)
    assert (metrics.steps, metrics.publishes, metrics.evals, metrics.samples) == ([STEP], [PUBLISH], [EVAL], [SAMPLE])
    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text(encoding="utf-8").split("\n")[:-1]]
    assert [row["kind"] for row in rows] == ["step", "publish", "eval"]
    assert [json.loads(line)["kind"] for _, _, line in sample_lines(tmp_path)] == ["sample"]
    assert rows[0]["staleness"] == {"0": 7, "2": 1}


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for record in (STEP, PUBLISH, EVAL):
            writer.write(record)
    events = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER))
    events.Reload()
    seen = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert seen["toy/train/reward_mean"] == [(3, 0.5)]
    assert seen["toy/train/rollout_tokens_per_s"] == [(3, 4000.0)]
    assert seen["toy/time/train_s"] == [(3, pytest.approx(0.8))]
    assert seen["toy/train/max_staleness"] == [(3, 2.0)]
    assert seen["toy/extra/capped_fraction"] == [(3, 0.25)]
    assert seen["toy/publish/total_ms"] == [(4, 20.0)]
    assert seen["toy/publish/wire_ms"] == [(4, 2.5)]
    assert seen["toy/eval/accuracy"] == [(4, 0.75)]
    assert seen["toy/eval/reward_mean"] == [(4, 0.5)]
    assert seen["toy/eval/unscored"] == [(4, 1.0)]
    assert "toy/train/loss" not in seen


def test_values_that_are_not_finite_come_back_as_none(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(StepRecord(step=0, version=0, time_s=1.0, loss=math.nan, grad_norm=math.inf, lr=0.1))
    step = read_metrics(tmp_path).steps[0]
    assert (step.loss, step.grad_norm, step.lr) == (None, None, 0.1)


def test_a_resumed_writer_cuts_a_torn_line_and_the_last_repeat_counts(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(StepRecord(step=0, version=0, time_s=1.0, reward_mean=0.1))
        writer.write(StepRecord(step=1, version=1, time_s=2.0, reward_mean=0.2))
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"kind":"step","step":2,"ver')
    assert [s.step for s in read_metrics(tmp_path).steps] == [0, 1]
    with MetricsWriter(tmp_path) as writer:
        writer.write(StepRecord(step=1, version=1, time_s=3.0, reward_mean=0.9))
        writer.write(StepRecord(step=1, version=1, time_s=3.0, reward_mean=0.4, adapter="other"))
    assert [(s.adapter, s.step, s.reward_mean) for s in read_metrics(tmp_path).steps] == [
        ("", 0, 0.1),
        ("", 1, 0.9),
        ("other", 1, 0.4),
    ]


@pytest.mark.parametrize("torn", [1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
@pytest.mark.parametrize("before", [b"", b"{}\n", b"{}\n" * BLOCK_BYTES])
def test_a_torn_line_of_any_length_is_cut(tmp_path: Path, before: bytes, torn: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(before + b"x" * torn)
    sink = JsonlSink(path)
    assert sink.nbytes == len(before)
    sink.write(b"[]")
    sink.close()
    assert path.read_bytes() == before + b"[]\n"


def test_a_full_disk_leaves_no_half_line_in_the_middle(tmp_path: Path) -> None:
    """The kernel takes a part of a line before it says that there is no room."""
    path, soft_hard = tmp_path / METRICS_FILE, resource.getrlimit(resource.RLIMIT_FSIZE)
    sink = JsonlSink(path)
    sink.write(msgspec.json.encode(STEP))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, soft_hard[1]))
    try:
        with pytest.raises(RecordError, match=f"{METRICS_FILE}: a record cannot be written: File too large"):
            sink.write(msgspec.json.encode(PUBLISH))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    sink.write(msgspec.json.encode(PUBLISH))
    sink.close()
    assert MetricsTail(tmp_path).read_new() == [STEP, PUBLISH]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(STEP)
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"kind":"step","step":"four"}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not a metrics record"):
        read_metrics(tmp_path)


def test_the_tail_reads_each_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    assert tail.read_new() == []
    with MetricsWriter(tmp_path) as writer:
        writer.write(STEP)
        assert tail.read_new() == [STEP]
        assert tail.read_new() == []
        writer.write(PUBLISH)
    whole = (tmp_path / METRICS_FILE).read_bytes()
    (tmp_path / METRICS_FILE).write_bytes(whole[:-5])
    assert tail.read_new() == []
    (tmp_path / METRICS_FILE).write_bytes(whole)
    assert tail.read_new() == [PUBLISH]


def test_the_tail_takes_a_long_file_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "TAIL_BYTES", 2000)
    with MetricsWriter(tmp_path) as writer:
        for step in range(40):
            writer.write(StepRecord(step=step, version=step, time_s=1.0))
    tail, pieces = MetricsTail(tmp_path), []
    while records := tail.read_new():
        pieces.append([r.step for r in records if isinstance(r, StepRecord)])
    assert len(pieces) > 5
    assert [step for piece in pieces for step in piece] == list(range(40))


def test_the_sequence_of_a_publish_adds_up_to_its_total() -> None:
    sequence = PUBLISH.sequence_ms()
    assert sequence["other"] == 17.5
    assert sum(sequence.values()) == PUBLISH.total_ms


def test_a_resume_undoes_what_was_recorded_beyond_its_version(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for adapter in ("a", "b"):
            for k in range(4):
                writer.write(StepRecord(step=k, version=k, time_s=1.0, adapter=adapter, n_tokens=1))
                writer.write(PublishRecord(version=k + 1, total_ms=1.0, adapter=adapter))
                writer.write(CheckpointRecord(version=k + 1, write_s=0.1, adapter=adapter, nbytes=k))
        writer.write(ResumeRecord(version=2, time_s=4.0, adapter="a"))
        writer.write(StepRecord(step=2, version=2, time_s=5.0, adapter="a", n_tokens=2))
    metrics = read_metrics(tmp_path)
    assert [(s.step, s.n_tokens) for s in metrics.steps if s.adapter == "a"] == [(0, 1), (1, 1), (2, 2)]
    assert [p.version for p in metrics.publishes if p.adapter == "a"] == [1, 2]
    assert [c.version for c in metrics.checkpoints if c.adapter == "a"] == [1, 2]
    assert [s.step for s in metrics.steps if s.adapter == "b"] == [0, 1, 2, 3]
    assert [c.version for c in metrics.checkpoints if c.adapter == "b"] == [1, 2, 3, 4]
    assert [(r.adapter, r.version, r.time_s) for r in metrics.resumes] == [("a", 2, 4.0)]


def test_the_trainers_idle_fraction_is_what_it_waited_for() -> None:
    step = StepRecord(
        step=0,
        version=0,
        time_s=1.0,
        step_s=4.0,
        wait_batch_s=1.0,
        checkpoint_join_s=0.5,
        publish_join_s=0.5,
        train_s=1.5,
        publish_pack_s=0.5,
    )
    assert step.trainer_idle == 0.5
    assert StepRecord(step=0, version=0, time_s=1.0).trainer_idle is None

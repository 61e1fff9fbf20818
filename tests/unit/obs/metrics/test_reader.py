"""Readers return each valid record once and name a line that is not a record."""

from pathlib import Path

import pytest

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics import reader
from areal_lora.obs.metrics.reader import MetricsTail, read_metrics, state_records
from areal_lora.obs.metrics.records import AdapterStateRecord, CheckpointRecord, PublishRecord, ResumeRecord, StepRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.obs.records import PUBLISH, STEP, step_record


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(STEP)
    with RunFolder(tmp_path).metrics.open("ab") as file:
        file.write(b'{"kind":"step","step":"four"}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not a metrics record"):
        read_metrics(tmp_path)


def test_the_tail_reads_each_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    tail = MetricsTail(RunFolder(tmp_path))
    assert tail.read_new() == []
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(STEP)
        assert tail.read_new() == [STEP]
        assert tail.read_new() == []
        writer.write(PUBLISH)
    whole = RunFolder(tmp_path).metrics.read_bytes()
    RunFolder(tmp_path).metrics.write_bytes(whole[:-5])
    assert tail.read_new() == []
    RunFolder(tmp_path).metrics.write_bytes(whole)
    assert tail.read_new() == [PUBLISH]


def test_the_tail_returns_what_is_before_a_line_that_is_no_record_then_names_it_then_goes_on(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(STEP)
    with RunFolder(tmp_path).metrics.open("ab") as file:
        file.write(b"no record\n")
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(PUBLISH)
    tail = MetricsTail(RunFolder(tmp_path))
    assert tail.read_new() == [STEP]
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not a metrics record"):
        tail.read_new()
    assert tail.read_new() == [PUBLISH]


def test_the_tail_takes_a_long_file_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TAIL_BYTES", 1000)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for step in range(40):
            writer.write(step_record(step=step, version=step, time_s=1.0))
    tail, pieces = MetricsTail(RunFolder(tmp_path)), []
    while records := tail.read_new():
        pieces.append([r.step for r in records if isinstance(r, StepRecord)])
    assert len(pieces) > 5
    assert [step for piece in pieces for step in piece] == list(range(40))


def test_a_resume_undoes_what_was_recorded_beyond_its_version(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for adapter in ("a", "b"):
            for k in range(4):
                writer.write(step_record(step=k, version=k, time_s=1.0, adapter=adapter, n_tokens=1))
                writer.write(PublishRecord(version=k + 1, total_ms=1.0, adapter=adapter))
                writer.write(CheckpointRecord(version=k + 1, write_s=0.1, adapter=adapter, nbytes=k))
        writer.write(ResumeRecord(version=2, time_s=4.0, adapter="a"))
        writer.write(step_record(step=2, version=2, time_s=5.0, adapter="a", n_tokens=2))
    metrics = read_metrics(tmp_path)
    assert [(s.step, s.metrics.get("train/n_tokens")) for s in metrics.steps if s.adapter == "a"] == [
        (0, 1),
        (1, 1),
        (2, 2),
    ]
    assert [p.version for p in metrics.publishes if p.adapter == "a"] == [1, 2]
    assert [c.version for c in metrics.checkpoints if c.adapter == "a"] == [1, 2]
    assert [s.step for s in metrics.steps if s.adapter == "b"] == [0, 1, 2, 3]
    assert [c.version for c in metrics.checkpoints if c.adapter == "b"] == [1, 2, 3, 4]
    assert [(r.adapter, r.version, r.time_s) for r in metrics.resumes] == [("a", 2, 4.0)]


def test_states_of_an_adapter_stay_until_a_resume_from_an_older_version(tmp_path: Path) -> None:
    def state(adapter: str, phase: AdapterPhase, version: int, reason: str = "") -> AdapterStateRecord:
        return AdapterStateRecord(adapter=adapter, state=phase, version=version, reason=reason, time_s=1.0)

    begun = [
        state("a", AdapterPhase.PENDING, 0),
        state("a", AdapterPhase.ACTIVE, 0),
        state("b", AdapterPhase.ACTIVE, 0),
    ]
    failed, done = state("a", AdapterPhase.FAILED, 3, "é\n"), state("b", AdapterPhase.DONE, 4)
    again = state("a", AdapterPhase.ACTIVE, 2)
    resume = ResumeRecord(version=2, time_s=4.0, adapter="a")
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for record in (*begun, failed, done):
            writer.write(record)
        assert read_metrics(tmp_path).states == [*begun, failed, done]
        writer.write(resume)
        writer.write(step_record(step=2, version=2, time_s=5.0, adapter="a"))
        writer.write(again)
    assert read_metrics(tmp_path).states == [*begun, done, again]
    assert state_records(RunFolder(tmp_path)) == [*begun, failed, done, resume, again]
    assert state_records(RunFolder(tmp_path / "new")) == []

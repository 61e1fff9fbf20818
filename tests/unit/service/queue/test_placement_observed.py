"""The records of the run by adapter."""

from __future__ import annotations

import json
from pathlib import Path

from areal_lora.obs.metrics.records import AdapterStateRecord, CheckpointRecord, EvalRecord, PublishRecord, ResumeRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.queue.placement import PAGE, ObservedAdapter, RunObserver
from areal_lora.types import AdapterPhase
from tests.support.obs.records import step_record


def test_each_adapter_has_its_own_records(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    observed = RunObserver(folder)
    assert not observed.look()
    with MetricsWriter(folder) as writer:
        for name in ("acme-a.1", "bolt-a.1"):
            writer.write(AdapterStateRecord(adapter=name, state=AdapterPhase.ACTIVE, version=0))
            writer.write(PublishRecord(adapter=name, version=0, total_ms=1.0))
        writer.write(step_record(adapter="acme-a.1", step=0, version=0, time_s=1.0, reward_mean=0.5, staleness={1: 4}))
        writer.write(CheckpointRecord(adapter="acme-a.1", version=1, write_s=0.1))
        writer.write(PublishRecord(adapter="acme-a.1", version=1, total_ms=1.0))
        writer.write(AdapterStateRecord(adapter="bolt-a.1", state=AdapterPhase.FAILED, version=0, reason="it broke"))
    observed.look()
    seen = observed.of("acme-a.1")
    assert (seen.phase, seen.version, seen.checkpoint) == (AdapterPhase.ACTIVE, 1, 1)
    assert seen.step is not None
    assert (seen.step.reward_mean, seen.step.mean_lag) == (0.5, 1.0)
    assert observed.phases() == {"acme-a.1": AdapterPhase.ACTIVE, "bolt-a.1": AdapterPhase.FAILED}
    assert observed.of("bolt-a.1").reason == "it broke"
    assert [r["kind"] for r in observed.records("acme-a.1", 0)] == ["state", "publish", "step", "checkpoint", "publish"]
    assert [r["kind"] for r in observed.records("acme-a.1", 3, 1)] == ["checkpoint"]
    assert observed.records("acme-a.1", 99) == observed.records("nobody.1", 0) == []
    assert [r["state"] for r in observed.states("bolt-a.1")] == ["active", "failed"]
    text = json.dumps([observed.records(name, 0) for name in ("acme-a.1", "bolt-a.1")])
    assert "acme" not in text, "the name that the run has is not shown"


def test_a_base_evaluation_does_not_name_the_adapter_that_it_was_made_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    with MetricsWriter(folder) as writer:
        writer.write(EvalRecord(adapter="bolt-a.1", version=0, step=0, n=8, accuracy=0.5, measured_with="acme-a.1"))
    observed = RunObserver(folder)
    observed.look()
    (record,) = observed.records("bolt-a.1", 0)
    assert record["accuracy"] == 0.5
    assert "acme" not in json.dumps(record)


def test_an_adapter_that_left_is_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    observed = RunObserver(folder)
    with MetricsWriter(folder) as writer:
        for name in ("acme-a.1", "acme-b.1"):
            for _ in range(PAGE + 5):
                writer.write(AdapterStateRecord(adapter=name, state=AdapterPhase.ACTIVE, version=0))
    while observed.look():
        pass
    observed.forget(but={"acme-a.1"})
    assert observed.phases() == {"acme-a.1": AdapterPhase.ACTIVE}
    assert observed.of("acme-b.1") == ObservedAdapter()
    seen = observed.of("acme-a.1")
    assert (seen.places.itemsize * len(seen.places), len(seen.states)) == (8 * (PAGE + 5), PAGE), "bytes of the index"
    assert len(observed.states("acme-a.1")) == len(observed.records("acme-a.1", 0)) == PAGE
    assert len(observed.records("acme-a.1", PAGE)) == 5


def test_a_resume_takes_back_what_comes_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    with MetricsWriter(folder) as writer:
        for step in range(3):
            writer.write(step_record(adapter="a.1", step=step, version=step, time_s=1.0))
            writer.write(CheckpointRecord(adapter="a.1", version=step + 1, write_s=0.1, failed=step == 2))
        writer.write(ResumeRecord(adapter="a.1", version=2, time_s=2.0))
    observed = RunObserver(folder)
    observed.look()
    assert observed.of("a.1").checkpoint == 2
    assert observed.of("a.1").step is None


def test_versions_of_a_clients_adapter_do_not_count_its_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    with MetricsWriter(folder) as writer:
        for step, version, taken in ((0, 0, True), (1, 4, True), (2, 9, False)):
            record = step_record(
                adapter="a.1", step=step, version=version, time_s=1.0, by_client=True, taken=taken, n_targets=8
            )
            writer.write(record)
        writer.write(ResumeRecord(adapter="a.1", version=9, time_s=2.0))
    observed = RunObserver(folder)
    observed.look()
    assert observed.of("a.1").step is None, "the step from version 9 comes again"
    found = [record for record in observed.records("a.1", 0) if record["kind"] == "step"]
    assert [(record["version"], record["n_targets"], record["taken"]) for record in found] == [
        (0, 8, True),
        (4, 8, True),
        (9, 8, False),
    ]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    line = b'{"kind":"state","adapter":"a.1","state":"active","version":0,"reason":"","time_s":0.0}\n'
    observed = RunObserver(folder)
    for cut in (1, 40, len(line)):
        folder.metrics.write_bytes(line[:cut])
        observed.look()
        assert (observed.of("a.1").phase is None) == (cut < len(line))
    assert len(observed.of("a.1").places) == 1

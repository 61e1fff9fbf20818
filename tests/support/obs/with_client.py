"""A run folder of an adapter with a data set and one that a client drives, made without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.obs.metrics.records import CheckpointRecord, PublishRecord, Record, ResumeRecord, StepRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.obs.records import step_record
from tests.support.obs.three_adapters import state, step, three_config

SECTION = {"workflow": {"kind": "client"}, "rank": 4, "alpha": 8, "target_modules": ["all-linear"], "weight": 2.0}
CLIENT = "mine.1"
MADE = [(0, 0, True), (1, 4, True), (2, 6, False), (2, 9, True)]
"""Step, version before it, whether it was taken: the third one's gradient was not finite."""


def client_config(*beside: str) -> Config:
    """The client's adapter, and adapters of `three_config` ``beside`` it."""
    config = three_config()
    others = [adapter for adapter in config.adapters if adapter.name in beside]
    mine = AdapterConfig.model_validate({"name": CLIENT, **SECTION})
    return config.model_copy(update={"adapters": [*others, mine]})


def client_step(index: int, version: int, time_s: float, *, taken: bool = True) -> StepRecord:
    return step_record(
        adapter=CLIENT,
        step=index,
        version=version,
        time_s=time_s,
        by_client=True,
        taken=taken,
        loss=0.5 / (index + 1),
        grad_norm=1.25 if taken else None,
        lr=4e-3,
        n_tokens=120,
        n_sequences=4,
        n_targets=100,
        step_s=2.0,
        train_s=0.5,
    )


def client_records(beside: bool = True) -> Iterator[Record]:
    """The client's steps, each followed by one of alpha with 200 tokens."""
    for name in (*(["alpha"] if beside else []), CLIENT):
        yield state(name, AdapterPhase.ACTIVE, 0, 0.5)
    for i, (index, version, taken) in enumerate(MADE):
        yield client_step(index, version, 2.0 * i + 1.0, taken=taken)
        if beside:
            yield step("alpha", i, 2.0 * i + 2.0)


def repeated() -> Iterator[Record]:
    """Rank 0 was killed before version 11 was durable: the step from version 9 is made again."""
    yield ResumeRecord(adapter=CLIENT, version=9, time_s=9.0)
    yield client_step(2, 9, 10.0)


def written() -> Iterator[Record]:
    yield CheckpointRecord(adapter=CLIENT, version=11, write_s=0.1, nbytes=1 << 20)
    yield PublishRecord(adapter=CLIENT, version=11, total_ms=30.0, probe_mean_abs=1e-6, differs_from_base=True)


def make_with_client(root: Path, *beside: str) -> Path:
    folder = RunFolder(root)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(client_config(*beside).model_dump_json())
    with MetricsWriter(folder) as writer:
        for record in (*client_records(bool(beside)), *repeated(), *written()):
            writer.write(record)
    return root

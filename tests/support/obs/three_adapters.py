"""A run of three adapters as its folder would be: one done, one failed, one done early. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.obs.metrics.records import AdapterStateRecord, EvalRecord, PublishRecord, Record, StepRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.obs.fake_run import make_config
from tests.support.obs.records import step_record
from tests.support.obs.rollouts import keep, step_rollouts

TURNS = [*["alpha", "beta", "gamma"] * 3, "alpha", "gamma", *["alpha"] * 4]
"""Whose step is next: 8 of alpha, 3 of beta, 4 of gamma; 2 s each."""
TOKENS = {"alpha": 200, "beta": 100, "gamma": 50}
REASON = "step 3: the advantage is not finite <NaN>"


def three_config() -> Config:
    """alpha and beta make the run's 8 steps, gamma its own 4; weights 2, 1, 1."""
    config = make_config()
    [only] = config.adapters
    own: dict[str, dict[str, object]] = {
        "alpha": {"weight": 2.0},
        "beta": {},
        "gamma": {"steps": 4, "max_staleness": 1},
    }
    adapters = [only.model_copy(update={"name": name, **values}) for name, values in own.items()]
    run = config.run.model_copy(update={"steps": 8})
    return config.model_copy(update={"adapters": adapters, "run": run})


def records(turns: int = len(TURNS)) -> Iterator[Record]:
    """Everything up to the step of the last of ``turns``, and what follows from it."""
    done = dict.fromkeys(TOKENS, 0)
    for name in TOKENS:
        yield state(name, AdapterPhase.PENDING, 0, 0.0)
        yield publish(name, 0)
        yield evaluation(name, 0, 0.25)
        yield state(name, AdapterPhase.ACTIVE, 0, 0.5)
    for turn, name in enumerate(TURNS[:turns]):
        time_s = 2.0 * (turn + 1)
        yield step(name, done[name], time_s)
        done[name] += 1
        if (name, done[name]) == ("beta", 3):
            yield state(name, AdapterPhase.FAILED, 3, time_s, REASON)
            continue
        yield publish(name, done[name])
        if done[name] == {"alpha": 8, "gamma": 4}.get(name):
            yield state(name, AdapterPhase.DRAINING, done[name], time_s)
            yield evaluation(name, done[name], 0.5)
            yield state(name, AdapterPhase.DONE, done[name], time_s + 0.5)
        elif (name, done[name]) == ("alpha", 4):
            yield evaluation(name, 4, 0.75)


def state(name: str, phase: AdapterPhase, version: int, time_s: float, reason: str = "") -> AdapterStateRecord:
    return AdapterStateRecord(adapter=name, state=phase, version=version, reason=reason, time_s=time_s)


def step(name: str, index: int, time_s: float) -> StepRecord:
    tokens = TOKENS[name]
    return step_record(
        step=index,
        version=index,
        time_s=time_s,
        adapter=name,
        reward_mean=(index + 1) / 8,
        loss=0.01,
        grad_norm=0.5,
        lr=1e-3,
        staleness={0: tokens} if index == 0 else {0: tokens // 2, 1: tokens // 2},
        step_s=2.0,
        wait_batch_s=0.5,
        train_s=1.0,
        rollout_tokens_per_s=4000.0,
        dropped={"stale": index},
    )


def publish(name: str, version: int) -> PublishRecord:
    phases: dict[str, float | None] = {"wire": 3.0, "verify": 2.0, "commit_wait": 4.0}
    return PublishRecord(
        version=version,
        total_ms=10.0,
        adapter=name,
        phases_ms=phases,
        probe_mean_abs=1e-7,
        probe_max_abs=2e-7,
        differs_from_base=version > 0,
    )


def evaluation(name: str, version: int, accuracy: float) -> EvalRecord:
    return EvalRecord(
        version=version, step=version, accuracy=accuracy, reward_mean=accuracy, n=20, unscored=1, adapter=name
    )


def make_three(folder: Path, turns: int = len(TURNS)) -> RunFolder:
    """Write configuration, records and rollouts of each adapter; export what is done."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder(folder)
    run.config.write_text(three_config().model_dump_json())
    with MetricsWriter(run) as writer:
        for record in records(turns):
            writer.write(record)
    keep(run, (step_rollouts(0, adapter=name, texts=[f"written by {name}"]) for name in TOKENS))
    for name in ("alpha", "gamma"):
        run.adapter_export(name).mkdir(parents=True, exist_ok=True)
    return run

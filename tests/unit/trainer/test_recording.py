"""Records of steps, read back from the disk."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import torch

from areal_lora.config.recorded import write_config
from areal_lora.data.collate import collate
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.obs.machine import MachineWatch
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import DroppedGroup, GroupText
from areal_lora.obs.metrics.rollout_store import RolloutWriter
from areal_lora.obs.report.inspector import GroupPlace, RolloutFilter, RolloutIndex
from areal_lora.obs.report.summary import read_summary
from areal_lora.obs.trace import Spans
from areal_lora.operations.protocol import OptimStep, StepResult
from areal_lora.rollout.channel.channel_messages import Batch, Stats
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.learn import LearnReport
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.step_metrics import Window
from areal_lora.types import AdapterPhase, AdapterRef, TrajectoryGroup
from tests.support.clocks import Clock, wait_until
from tests.support.obs.page import Page
from tests.support.rollout.helpers import NAME, config, stream, trajectory
from tests.support.sizes import size
from tests.support.trainer.long_run import RESUMED

NONE = dict.fromkeys(("ready", "running", "leased", "issued", "consumed", "reissued", "late", "ahead"), 0)
STATS = Stats(**NONE, dropped={}, retried={}, tokens_generated=0, idle_s=0.0, margin_s=0.0, spare_s=None)
EMPTY = Batch(adapter=NAME, step=0, groups=(), stats=STATS, texts=(), events=(), snapshot=b"")


def test_rewards_are_averaged_over_samples_and_not_over_their_trajectories(tmp_path: Path) -> None:
    """An agent's sample of three conversations and reward 0 beside one of one conversation and reward 1."""
    prompt = stream().at(0)
    many = tuple(replace(trajectory(prompt, 0, reward=0.0), uid=f"a{i}", sample=0) for i in range(3))
    group = TrajectoryGroup(uid=prompt.uid, trajectories=(*many, trajectory(prompt, 0, index=1, reward=1.0)))
    recorder = Recorder(RunFolder(tmp_path), [NAME], {}, time.monotonic())
    report = LearnReport(sums=defaultdict(float, tokens=8.0), grad_norm=1.0, lr=1e-3, skipped=0.0)
    spans = Spans()
    phases = "wait_batch annotate train checkpoint_join checkpoint_copy publish_join publish_pack"
    spans.seconds.update(dict.fromkeys(phases.split(), 0.0))
    batch = collate(PackedGroups.of([group]))
    recorder.step(AdapterRef(name=NAME, version=1), batch, report, {0: 8}, spans)
    [step] = read_metrics(tmp_path).steps
    got = (step.reward_mean, step.metrics["train/reward_std"], step.metrics["train/n_sequences"])
    assert got == (0.5, 0.5, 4)
    sampled = [-p for t in group.trajectories for p, on in zip(t.rollout_logprobs, t.loss_mask, strict=True) if on]
    assert step.metrics["train/sampled_nll"] == pytest.approx(sum(sampled) / len(sampled))
    given = replace(batch, given=torch.ones_like(batch.given))
    recorder.step(AdapterRef(name=NAME, version=2), given, report, {0: 8}, spans)
    assert "train/sampled_nll" not in read_metrics(tmp_path).steps[-1].metrics


@pytest.mark.parametrize("phase", ["done", "failed", "deleted", "paused"])
def test_nothing_over_the_tokens_of_a_batch_is_kept_of_an_adapter_that_has_ended(tmp_path: Path, phase: str) -> None:
    """A report has arrays over all tokens, a batch the rollouts: 17 MiB a million tokens, and adapters come and go."""
    groups = (TrajectoryGroup(uid="0:a", trajectories=(trajectory(stream().at(0), 0),)),)
    recorder = Recorder(RunFolder(tmp_path), [NAME, "b"], {}, time.monotonic())
    kept: list[weakref.ref[Any]] = []
    for name in (NAME, "b"):
        logprobs = torch.ones(4)
        report = LearnReport(
            sums=defaultdict(float, tokens=8.0), grad_norm=1.0, lr=1e-3, skipped=0.0, logprobs=logprobs
        )
        recorder.step(AdapterRef(name=name, version=1), collate(PackedGroups.of(groups)), report, {0: 8}, Spans())
        received = msgspec.structs.replace(EMPTY, adapter=name, groups=groups)
        recorder.batch(received)
        kept += [weakref.ref(logprobs)]
        del logprobs, report
    recorder.phase(AdapterRef(name=NAME, version=1), AdapterPhase(phase), "")
    gc.collect()
    assert [one() is not None for one in kept] == [phase == "paused", True]
    assert [*recorder._batches] == ([NAME, "b"] if phase == "paused" else ["b"])
    assert [*recorder._meter._marks] == [*recorder._batches]


def test_a_step_has_the_use_of_the_machines(tmp_path: Path) -> None:
    folder, groups = RunFolder(tmp_path), (TrajectoryGroup(uid="0:a", trajectories=(trajectory(stream().at(0), 0),)),)
    folder.statuses.mkdir(parents=True)
    machines = MachineWatch(folder, "trainer", 0, collects=True)
    wait_until(lambda: machines.rounds.take())
    recorder = Recorder(folder, [NAME], {}, time.monotonic(), machines=machines)
    report = LearnReport(sums=defaultdict(float, tokens=8.0), grad_norm=1.0, lr=1e-3, skipped=0.0)
    recorder.step(AdapterRef(name=NAME, version=1), collate(PackedGroups.of(groups)), report, {0: 8}, Spans())
    recorder.close()
    [step] = read_metrics(tmp_path).steps
    tags = {tag for tag in step.metrics if tag.startswith("machine/")}
    assert tags == {
        f"machine/trainer/{os.uname().nodename}/{name}"
        for name in ("cpu_share", "core_share", "memory_gib", "disk_free_gib")
    }


def test_the_rollouts_of_a_step_are_kept_with_what_the_trainer_knows_and_repeats_replace_them(tmp_path: Path) -> None:
    prompts = [stream().at(i) for i in range(2)]
    groups = tuple(
        TrajectoryGroup(uid=p.uid, trajectories=(trajectory(p, 3), trajectory(p, 3, index=1, reward=0.0)))
        for p in prompts
    )
    texts = tuple(GroupText(prompt=p.text, answers=("yes", "no"), tries=1 + i) for i, p in enumerate(prompts))
    lost = DroppedGroup(reason="stale", group=groups[0], text=texts[0])
    received = msgspec.structs.replace(EMPTY, adapter=NAME, step=4, groups=groups, texts=texts, dropped=(lost,))
    batch = collate(PackedGroups.of(groups))
    sums, entropies = defaultdict(float, tokens=8.0), batch.loss_mask * 1.5
    own = torch.where(batch.loss_mask, batch.rollout_logprobs - 0.5, 0)
    report = LearnReport(sums=sums, grad_norm=1.0, lr=1e-3, skipped=0.0, entropies=entropies, logprobs=own)
    annotated = replace(batch, advantages=batch.loss_mask * 2.0)
    routed = tuple(
        replace(
            g,
            trajectories=tuple(
                replace(t, columns=t.columns.routed(bytes(384 * len(t.columns)))) for t in g.trajectories
            ),
        )
        for g in groups
    )
    received = msgspec.structs.replace(received, groups=routed)
    for resumed in ({}, {NAME: 4}):
        rollouts = RolloutWriter(RunFolder(tmp_path), 1 << 20, list)
        recorder = Recorder(RunFolder(tmp_path), [NAME], resumed, time.monotonic(), rollouts=rollouts)
        recorder.batch(received)
        assert recorder._batches[NAME][0].groups == groups, "no routes wait for the end of the step"
        recorder.step(AdapterRef(name=NAME, version=5), annotated, report, {0: 8}, Spans())
        recorder.close()
    index = RolloutIndex(RunFolder(tmp_path))
    heads = index.rollouts(RolloutFilter(outcome="trained"))
    assert [(h.step, h.group, h.answer, h.reward, h.newest) for h in heads] == [
        (4, group, answer, reward, 3) for group in (0, 1) for answer, reward in (("yes", 1.0), ("no", 0.0))
    ]
    assert {(h.advantage, h.mismatch) for h in heads} == {(2.0, 0.5)}
    assert [h.outcomes for h in heads] == [["stale"], ["stale"], ["stale", "retried"], ["stale", "retried"]]
    assert [h.prompt for h in heads[::2]] == [p.text for p in prompts]
    dropped = index.rollouts(RolloutFilter(outcome="dropped"))
    view = index.group(GroupPlace(adapter=NAME, step=4, group=1))
    assert [x for one in view.rollouts for x in one.entropies or ()] == entropies[len(entropies) // 2 :].tolist()
    assert [(h.step, h.group, h.answer, h.dropped) for h in dropped] == [(4, 2, "yes", "stale"), (4, 2, "no", "stale")]


def test_the_record_of_a_clients_step_has_its_spans_and_nothing_of_rollouts(tmp_path: Path) -> None:
    clock = Clock()
    spans = Spans(lambda: clock.now)
    spans.add("train", 0.5)
    spans.add("publish_pack", 0.25)
    clock.now += 4.0
    recorder = Recorder(RunFolder(tmp_path), [], {}, time.monotonic())
    before, window = AdapterRef(name="a.1", version=7), Window(tokens=10, sequences=4, targets=8, loss=4.0)
    for version, skipped in ((7, False), (8, True)):
        stepped = StepResult(step=3, grad_norm=1.5, skipped=skipped)
        recorder.client_step(replace(before, version=version), window, OptimStep(lr=0.01), stepped, spans)
    taken, skip = read_metrics(tmp_path).steps
    assert (taken.adapter, taken.version, taken.step, taken.taken, taken.trained_tokens) == ("a.1", 7, 2, True, 8)
    assert (taken.step_s, taken.spans) == (4.0, {"train": 0.5, "publish_pack": 0.25})
    assert (taken.reward_mean, taken.mean_lag, taken.trainer_idle) == (None,) * 3
    assert (skip.version, skip.step, skip.taken) == (8, 3, False)


def test_a_report_that_cannot_be_written_is_logged_and_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(run_folder: RunFolder) -> NoReturn:
        raise ValueError("Parquet magic bytes not found")

    run = RunFolder(tmp_path)
    write_config(run, config("m"))
    monkeypatch.setattr("areal_lora.trainer.recording.write_report", damaged)
    Recorder(run, [NAME], {}, time.monotonic()).finish({})
    assert read_summary(run).steps == 0
    assert "report.html is not written (fix: areal-lora report)" in caplog.text
    assert "Parquet magic bytes not found" in caplog.text


def test_a_long_run_is_opened_resumed_and_finished_in_little_memory(tmp_path: Path) -> None:
    steps = size(5000, 100_000)
    command = [sys.executable, "-m", "tests.support.trainer.long_run", str(tmp_path), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    cost = json.loads(done.stdout)
    print(cost)
    assert cost["file_bytes"] > 1200 * steps
    assert cost["grown_bytes"] < 40 << 20
    assert cost["opened_s"] + cost["finished_s"] < 60.0
    kept = round(steps * RESUMED)
    assert cost["steps_done"] == kept
    summary = read_summary(tmp_path)
    assert (summary.steps, summary.publishes, summary.dropped) == (kept, kept, {"stale": (kept - 1) // 7})
    assert summary.staleness_histogram == {0: 300 * kept, 1: 700 * kept}
    assert (summary.eval_before, summary.eval_after) == (0.0, kept / steps)
    html = (tmp_path / "report.html").read_text()
    assert len(html) < 1 << 20
    # The one step of a large gradient norm is among the points of its chart.
    [chart] = [c for c in Page(html).data.sections[0].charts if c.title == "Entropy and gradient norm"]
    [norms] = [line.y for line in chart.lines if line.name == "grad_norm"]
    assert sum(norm > 10 * min(norms) for norm in norms) == 1

"""What a resume takes from a checkpoint and the records, and its log line."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from areal_lora.checkpoint.checkpoint_store import plan_deletions, version_folder
from areal_lora.checkpoint.recover import AdapterResume, WholeCheckpoint, recorded_evaluations
from areal_lora.checkpoint.state import Evaluation, Manifest
from areal_lora.config.load import load_config
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.versions.checkpointing import LAYOUT, chosen, load, random_state
from tests.support.checkpoint.helpers import SPEC, manifest_of, on_ranks, snapshot_of, stores
from tests.support.paths import EXAMPLES
from tests.support.trainer.recorded import make_adapter


def test_the_evaluation_of_the_newest_checkpoint_is_among_those_of_the_resumed_run(tmp_path: Path) -> None:
    """A run of 50 steps that continues: v50 is the best, no multiple of eval.every_steps, and is not measured again."""
    folder, device = RunFolder(tmp_path), torch.device("cpu")
    measured = {40: Evaluation(accuracy=0.5, reward_mean=0.5)}
    made = stores(tmp_path)

    def write(rank: int) -> None:
        made[rank].write(replace(snapshot_of(50, rank, measured), random=random_state(device)))

    assert on_ranks(write) == [None, None]
    last = EvalRecord(adapter=SPEC.name, version=50, step=50, accuracy=0.75, reward_mean=0.25, n=8, measure="m")
    MetricsWriter(folder).write(last)
    path = str(version_folder(folder.adapter_checkpoints(SPEC.name), 50))
    engine: Any = SimpleNamespace(rank=0, device=device, load_state=lambda name, tensors, step: None)
    restored = load(engine, make_adapter(), path, recorded_evaluations(folder))
    assert restored is not None
    _, kept = restored
    assert kept.evaluations == measured | {50: Evaluation(accuracy=0.75, reward_mean=0.25, measure="m")}
    assert plan_deletions([40, 50, 51, 52], [51, 52], kept.evaluations, kept.pending) == [40]


@pytest.mark.parametrize("key", ["world_size", "tp", "cp", "pp", "ep", "etp"])
def test_every_parallel_size_that_changed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str) -> None:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"])
    now = config.trainer.model_dump(include=set(LAYOUT))
    layout = now | {key: 8} if key in now else now  # as the trainer would have written it
    manifest = msgspec.structs.replace(manifest_of(3), layout=layout)
    found = WholeCheckpoint(path=tmp_path, manifest=manifest)
    plan = [AdapterResume(adapter=manifest.spec.name, newest=found)]
    renamed = config.adapters[0].model_copy(update={"name": manifest.spec.name})
    with caplog.at_level(logging.INFO):
        assert chosen(plan, config.model_copy(update={"adapters": [renamed]})) == [str(tmp_path)]
    assert f"{key} 8 -> {getattr(config.trainer, key)}" in caplog.text


def test_every_value_of_the_optimizer_that_changed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As it was written: a list, no clipping."""
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"])
    manifest = manifest_of(3)
    was = config.adapters[0].optimizer.model_copy(update={"max_grad_norm": None, "min_lr_ratio": 0.1})
    clock = msgspec.structs.replace(manifest.clock, settings=was.model_dump())
    written = msgspec.json.encode(msgspec.structs.replace(manifest, clock=clock))
    read = msgspec.json.decode(written, type=Manifest)
    plan = [AdapterResume(adapter=manifest.spec.name, newest=WholeCheckpoint(path=tmp_path, manifest=read))]
    optimizer = was.model_copy(update={"betas": [0.9, 0.999], "max_grad_norm": 0.5, "min_lr_ratio": 0.2})
    now = config.adapters[0].model_copy(update={"name": manifest.spec.name, "optimizer": optimizer})
    with caplog.at_level(logging.INFO):
        chosen(plan, config.model_copy(update={"adapters": [now]}))
    changes = "betas [0.9, 0.95] -> [0.9, 0.999], max_grad_norm None -> 0.5, min_lr_ratio 0.1 -> 0.2"
    assert changes in caplog.text

"""The log line of a resume."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from areal_lora.checkpoint.recover import AdapterResume, WholeCheckpoint
from areal_lora.checkpoint.state import Manifest
from areal_lora.config.load import load_config
from areal_lora.trainer.versions.checkpointing import LAYOUT, chosen
from tests.support.checkpoint.helpers import manifest_of
from tests.support.paths import EXAMPLES


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

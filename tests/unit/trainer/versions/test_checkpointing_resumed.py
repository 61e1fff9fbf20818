"""The log line of a resume."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from areal_lora.checkpoint.recover import AdapterResume, WholeCheckpoint
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

"""What a rank's engine is built of."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.engine import fsdp_engine
from areal_lora.trainer.build import build_engine
from tests.support.paths import EXAMPLES


def test_the_fsdp_engine_is_for_the_servers_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which servers, and so the trainer, choose the factors of LongRoPE."""
    built: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fsdp_engine, "FsdpEngine", lambda *arguments: built.append(arguments))
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    config = load_config(files, ["trainer.engine=fsdp", "trainer.ep=1", "rollout.max_model_len=77"])
    build_engine(config)
    assert [arguments[:2] for arguments in built] == [(config.model, config.trainer)]
    assert built[0][3:] == (77,)

"""Which of vLLM's model runners a server takes."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from areal_lora.config.load import load_config
from areal_lora.engine.vllm_ext.server.main import set_environment
from tests.support.paths import EXAMPLES

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.mark.parametrize(
    ("device", "given", "taken"),
    [("cpu", None, "0"), ("npu", None, "0"), ("cuda", None, None), ("cuda", "0", "0"), ("cpu", "1", "1")],
)
def test_gpus_have_the_one_that_vllm_chooses_unless_the_environment_names_one(
    device: str, given: str | None, taken: str | None
) -> None:
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    config = load_config(files, [f"cluster.device={device}"])
    with mock.patch.dict(os.environ):
        os.environ.pop(RUNNER, None)
        os.environ |= {RUNNER: given} if given else {}
        set_environment(config)
        assert os.environ.get(RUNNER) == taken

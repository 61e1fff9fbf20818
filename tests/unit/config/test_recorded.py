"""Run folders of earlier versions: the configuration that one recorded is read, so the run can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.recorded import read_config
from areal_lora.config.sections.task import JudgeReward
from areal_lora.run_folder.paths import RunFolder
from tests.support.paths import EXAMPLES

RECORDED = Path(__file__).parent / "recorded"
"""Written by version 0.1.0 of 2026-11-23, with every key."""


@pytest.mark.parametrize("file", sorted(RECORDED.iterdir()), ids=lambda file: file.stem)
def test_a_recorded_configuration_of_an_earlier_version_is_read(file: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_bytes(file.read_bytes())
    config = read_config(folder)
    assert config.trainer.recompute == ("full" if file.stem == "slurm" else "none")
    assert config.rollout.engine_args == ({} if file.stem == "slurm" else {"enforce_eager": True})


def test_keys_that_have_another_name_keep_their_meaning(tmp_path: Path) -> None:
    data = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]).model_dump(
        mode="json"
    )
    [adapter] = data["adapters"]
    adapter["algorithm"] |= {"ratio": "rollout", "behaviour_correction": "none"}
    judge = {"kind": "judge", "url": "http://127.0.0.1/v1", "model": "m", "prompt": "Grade {completion}."}
    gone = {"system_prompt": "Be fair.", "json_field": "score", "timeout_s": 9.0, "workers": 2, "weight": 0.5}
    adapter["reward"] = judge | gone
    folder = RunFolder(tmp_path)
    folder.config.write_text(json.dumps(data))
    config = read_config(folder)
    [adapter] = config.adapters
    assert adapter.algorithm.behaviour_correction == "in_ratio"
    assert adapter.reward_weights == [0.5]
    [reward] = adapter.rewards
    assert isinstance(reward, JudgeReward)
    assert reward.prompt == "Be fair.\nGrade {completion}."

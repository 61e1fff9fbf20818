"""The configuration that a run folder records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.recorded import read_config, write_config
from areal_lora.errors import ConfigError
from areal_lora.run_folder.paths import RunFolder
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


def test_a_recorded_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    config, folder = load_config(FILES), RunFolder(tmp_path)
    write_config(folder, config)
    assert read_config(folder) == config


def test_a_recorded_configuration_with_other_keys_is_refused(tmp_path: Path) -> None:
    folder, data = RunFolder(tmp_path), load_config(FILES).model_dump(mode="json")
    data["rollout"]["beams"] = 2
    folder.config.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"cannot read it \(1 keys differ\).* --fresh"):
        read_config(folder)

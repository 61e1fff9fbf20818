"""The configuration that a run folder records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from areal_lora.cli.find_run import with_overrides
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


def test_a_recorded_configuration_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[str]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    write_config(RunFolder(tmp_path), load_config(FILES))
    assert synced[-1] == str(tmp_path), "a run whose config.json is empty after a loss of power cannot be resumed"


@pytest.mark.parametrize("workflow", [{"kind": "agent", "path": "m:f"}, {"kind": "gym", "env": "m:E"}])
def test_turns_that_earlier_commits_recorded_for_every_kind_count_for_none(
    tmp_path: Path, workflow: dict[str, str]
) -> None:
    folder, data = RunFolder(tmp_path), load_config(FILES).model_dump(mode="json")
    data["adapters"][0]["workflow"] = workflow | {"max_turns": 8}
    if workflow["kind"] == "gym":
        folder.config.write_text(json.dumps(data))
        assert read_config(folder).adapters[0].workflow.max_turns == 8  # type: ignore[union-attr]
    del data["adapters"][0]["optimizer"]["betas"]
    folder.config.write_text(json.dumps(data))
    assert read_config(folder).adapters[0].workflow.max_turns is None  # type: ignore[union-attr]
    assert with_overrides(folder, ["run.steps=9"]).run.steps == 9


def test_a_recorded_configuration_with_other_keys_is_refused(tmp_path: Path) -> None:
    folder, data = RunFolder(tmp_path), load_config(FILES).model_dump(mode="json")
    data["rollout"]["beams"] = 2
    folder.config.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"cannot read it \(1 keys differ\).* --fresh"):
        read_config(folder)

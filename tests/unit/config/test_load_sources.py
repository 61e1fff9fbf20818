"""Bare names of shipped examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.config.load import configuration_file, examples, load_config
from areal_lora.errors import ConfigError
from tests.support.paths import TINY_MODEL

NAMES = ["gsm8k_grpo_megatron_lora_moe.yaml", "embedded.yaml"]


def test_a_bare_name_is_a_shipped_example_with_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(NAMES)
    assert (config.run.name, config.model.folder) == ("embedded", str(TINY_MODEL))


def test_a_file_of_the_working_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAMES[1]).write_text("run: {name: mine}\n")
    assert load_config(NAMES).run.name == "mine"


def test_a_path_is_no_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("x/embedded.yaml", "./../embedded.yaml", "nowhere.yaml"):
        with pytest.raises(ConfigError, match="no such configuration file"):
            load_config([path])
    assert configuration_file(Path("embedded.yaml")).parent.parent == examples()

"""Run folders of earlier versions: the configuration that one recorded is read, so the run can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.config.recorded import read_config
from areal_lora.run_folder.paths import RunFolder

RECORDED = Path(__file__).parent / "recorded"
"""Written by version 0.1.0 of 2026-11-23, with every key."""


@pytest.mark.parametrize("file", sorted(RECORDED.iterdir()), ids=lambda file: file.stem)
def test_a_recorded_configuration_of_an_earlier_version_is_read(file: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_bytes(file.read_bytes())
    config = read_config(folder)
    assert config.trainer.recompute == ("full" if file.stem == "slurm" else "none")
    assert config.weight_sync.wire_dtype in ("float32", "bfloat16"), "what the run began with stays"
    assert config.rollout.engine_args == ({} if file.stem == "slurm" else {"enforce_eager": True})

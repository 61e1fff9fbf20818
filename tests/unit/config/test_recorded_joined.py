"""Adapters of the desired state as entries of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.recorded import alone, joined, with_joined
from areal_lora.errors import ConfigError
from areal_lora.run_folder.paths import DesiredAdapter, DesiredAdapters, DesiredPhase, RunFolder, write_desired
from tests.support.paths import EXAMPLES

SERVICE = ["service={}", "rollout.max_adapters=4"]


@pytest.fixture
def section() -> dict[str, Any]:
    [first, *_] = yaml.safe_load((EXAMPLES / "three_adapters.yaml").read_text())["adapters"]
    return {key: value for key, value in first.items() if key != "name"}


@pytest.fixture
def config() -> Config:
    return load_config([EXAMPLES / "three_adapters.yaml"], SERVICE)


def test_an_adapter_that_joins_is_configured_like_a_listed_one(config: Config, section: dict[str, Any]) -> None:
    found = joined(config, DesiredAdapter(name="attention", incarnation=3, adapter=section))
    assert found == config.adapters[0].model_copy(update={"name": "attention.3"})
    assert alone(config, found).adapters == [found]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rank": 0}, "rank: 0 is not allowed in the settings of a.1"),
        ({"rnk": 8}, r"rnk: unknown key in the settings of a.1 \(fix: use rank\)"),
        ({"optimizer": {}}, r"optimizer.lr: is required and set nowhere \(the settings of a.1\)"),
        ({"task": {"kind": "chess"}}, "task.kind: .chess. is not allowed .* give one of"),
    ],
)
def test_wrong_settings_are_named_by_their_own_keys(
    config: Config, section: dict[str, Any], changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        joined(config, DesiredAdapter(name="a", incarnation=1, adapter=section | changed))


def test_who_looks_at_a_run_sees_those_that_joined(config: Config, section: dict[str, Any], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    entries = (
        DesiredAdapter(name="a", incarnation=1, phase=DesiredPhase.DELETED, adapter=section),
        DesiredAdapter(name="a", incarnation=2, adapter=section | {"steps": 5}),
        DesiredAdapter(name="bad", incarnation=1, adapter={}),
    )
    write_desired(folder, DesiredAdapters(generation=1, adapters=entries))
    names = [adapter.name for adapter in with_joined(config, folder).adapters]
    assert names == ["attention", "experts", "shared", "a.1", "a.2"]
    without = config.model_copy(update={"service": None})
    assert with_joined(without, folder) is without

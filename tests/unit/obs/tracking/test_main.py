"""``run.trackers``: what is refused before a run starts. The process is in tests/process/cli/test_track.py."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.sections.run import CheckpointConfig, TrackerName
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.obs.tracking.main import CLIENTS, Client, check_clients, clients_of, send
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_config
from tests.support.paths import EXAMPLES, ROOT


def test_every_name_has_a_client_and_an_extra_and_tensorboard_needs_neither() -> None:
    assert {*CLIENTS, "tensorboard"} == set(get_args(TrackerName))
    assert clients_of(["wandb", "tensorboard", "mlflow", "wandb"]) == ["wandb", "mlflow"]
    extras = (ROOT / "pyproject.toml").read_text()
    for name, client in CLIENTS.items():
        assert re.search(rf'^{name} = \["{client.package}>=', extras, re.MULTILINE)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_missing_package_is_one_line_with_the_extra(name: TrackerName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentError_, match=rf"^[^\n]+pip install 'areal-lora\[{name}\]'[^\n]+$"):
        check_clients(["tensorboard", name])


def test_an_address_that_only_the_user_knows_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lora.obs.tracking.tracker.find_spec", lambda name: ModuleSpec(name, None, origin="x"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    check_clients(["wandb", "trackio", "swanlab"])
    with pytest.raises(ConfigError, match=r"run.trackers: mlflow has no address .fix: set the variable MLFLOW"):
        check_clients(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    check_clients(["mlflow"])
    assert CLIENTS["mlflow"].place == "http://127.0.0.1:1"


def test_what_a_tracker_gets_follows_from_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, given = SimpleNamespace(where="memory"), dict[str, Any]()
    monkeypatch.setitem(CLIENTS, "wandb", Client("wandb", "NONE", None, lambda *_: client))
    monkeypatch.setattr("areal_lora.obs.tracking.tracker.follow", lambda *_, **options: given.update(options))
    checkpoint = CheckpointConfig(every_steps=20, max_behind=3)
    config = make_config().model_copy(update={"checkpoint": checkpoint})
    send(RunFolder(tmp_path), config, "wandb", "", lambda: None, lambda _: None)
    assert given["behind"] == 22, "a crash repeats at most 23 steps, of which the first waits for 22"
    assert given["only"] == "toy"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"]
    with pytest.raises(ConfigError, match=r"run\.trackers\.0: 'comet' is not allowed") as caught:
        load_config(files, ["run.trackers=[comet]"])
    assert "'wandb', 'mlflow', 'trackio', 'swanlab' or 'tensorboard'" in str(caught.value)

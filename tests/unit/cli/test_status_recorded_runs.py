"""Which folder a word on the command line means."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.cli.find_run import find_run
from areal_lora.cli.train import with_overrides
from areal_lora.config.recorded import read_config_here
from areal_lora.errors import ConfigError
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_run(tmp_path / "runs" / "first run", steps=1)
    (tmp_path / "deep" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_found_by_path_and_by_name_from_any_folder_below(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = place / "runs" / "first run"
    assert find_run("first run").path == want
    assert find_run("runs/first run").path == want
    assert find_run(str(want)).path == want
    monkeypatch.chdir(place / "deep" / "below")
    assert find_run("first run").path == want
    monkeypatch.chdir(want)
    assert find_run(".").path == want


def test_an_unknown_name_lists_the_runs_that_exist(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"second: there is no such run .*one of the runs in .*runs: first run"):
        find_run("second")


def test_the_configuration_is_that_of_the_place_where_the_folder_is(place: Path) -> None:
    (place / "runs" / "first run").rename(place / "runs" / "moved")
    config = read_config_here(find_run("moved"))
    assert config.run_folder.path == place / "runs" / "moved"


def test_overrides_are_applied_and_checked(place: Path) -> None:
    folder = RunFolder(place / "runs" / "first run")
    config = with_overrides(folder, ["run.steps=77", "adapters.toy.optimizer.lr=0.5"])
    assert (config.run.steps, config.adapters[0].optimizer.lr) == (77, 0.5)
    assert config.run_folder == folder
    with pytest.raises(ConfigError, match=r"run\.stepps.*unknown key"):
        with_overrides(folder, ["run.stepps=77"])
    with pytest.raises(ConfigError, match="the run folder decides"):
        with_overrides(folder, ["run.name=other"])


def test_the_newest_session_of_a_job_is_looked_at(place: Path) -> None:
    (place / "runs" / "first run" / "session").write_text("7-2\n")
    assert find_run("first run").statuses == place / "runs" / "first run" / "sessions" / "7-2" / "status"

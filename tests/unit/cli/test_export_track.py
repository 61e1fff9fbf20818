"""``areal-lora track``: what it refuses, in one line; when a run has ended. The SDKs are in tests/process/cli."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from areal_lora.cli import app
from areal_lora.cli.status import ended
from areal_lora.config.recorded import read_config_here
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return RunFolder(make_run(tmp_path_factory.mktemp("a folder") / "a run", steps=2))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 64, "it needs one tracker"),
        (["--wandb", "p", "--mlflow", "http://127.0.0.1:1"], 64, "it needs one tracker"),
        (["--wandb", "p", "--experiment", "x"], 64, "--experiment: it belongs to --mlflow"),
        (["--mlflow", "http://127.0.0.1:1", "--entity", "x"], 64, "--entity: it belongs to --wandb"),
        (["--trackio", "p", "--entity", "x"], 64, "--entity: it belongs to --wandb"),
        (["--mlflow", "https://me:pass-word@127.0.0.1:1"], 64, "MLFLOW_TRACKING_PASSWORD"),
        (["--wandb", "p"], 69, "pip install 'areal-lora[wandb]'"),
        (["--mlflow", "http://127.0.0.1:1"], 69, "pip install 'areal-lora[mlflow]'"),
        (["--trackio", "p"], 69, "pip install 'areal-lora[trackio]'"),
        (["--swanlab", "p"], 69, "pip install 'areal-lora[swanlab]'"),
    ],
)
def test_a_refusal_is_one_line(
    run: RunFolder,
    words: list[str],
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("wandb", "mlflow", "trackio", "swanlab"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert app.main(["track", str(run), *words]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert text in err
    assert "pass-word" not in err


def test_a_wrong_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["track", str(tmp_path / "nowhere"), "--wandb", "p"]) == 64
    assert "there is no such run" in capsys.readouterr().err


def test_a_run_has_ended_when_no_launcher_holds_it(run: RunFolder) -> None:
    config = read_config_here(run)
    with run.lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert ended(run, config) is None
    assert ended(run, config) == "stopped"
    run.summary.write_text("{}")
    assert ended(run, config) == "done"
    run.summary.unlink()

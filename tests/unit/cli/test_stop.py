"""A stop from another host than the launcher's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_lora.cli.stop import stop_launcher
from areal_lora.errors import ConfigError
from areal_lora.launcher.start import run_lock
from areal_lora.run_folder.paths import RunFolder
from tests.support.launcher.other_host import look_from_elsewhere


def test_process_and_host_of_the_launcher_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    named = f"its launcher is process {os.getpid()} on {os.uname().nodename} .*kill -TERM {os.getpid()} there"
    with run_lock(folder):
        look_from_elsewhere(monkeypatch, tmp_path)
        with pytest.raises(ConfigError, match=named):
            stop_launcher(folder, now=False)
    stop_launcher(folder, now=False)
    assert "nothing to stop" in capsys.readouterr().out

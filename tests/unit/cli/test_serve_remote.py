"""``areal-lora serve-remote``: what it refuses is one line, and no token is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_lora.cli.app import main
from areal_lora.cli.serve import TOKEN
from tests.support.engine.vllm_ext.remote_world import World, remote_run

pytestmark = pytest.mark.slow
STALE = "5e" * 32


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with remote_run(tmp_path) as world:
        yield world


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["serve-remote", *words]) == 64
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert STALE not in line
    return line


def test_what_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    assert "there is no token" in refused(capsys, world.url)
    assert "cannot be read" in refused(capsys, world.url, "--token-file", str(file))
    file.write_text(f"{STALE}\n")
    file.chmod(0o644)
    assert "can be read by others (fix: chmod 600" in refused(capsys, world.url, "--token-file", str(file))
    file.chmod(0o600)
    assert "does not take this token (fix: copy remote.token" in refused(capsys, world.url, "--token-file", str(file))
    monkeypatch.setenv(TOKEN, STALE)
    assert "does not take this token" in refused(capsys, world.url)
    assert "no gateway answers there" in refused(capsys, "http://127.0.0.1:9", "--token-file", str(file))
    file.write_text(world.token)
    other = refused(capsys, world.url, "--token-file", str(file), "--model", str(tmp_path / "none"))
    assert "is not the run's base model" in other

"""Folders of owners that live, were killed, or are others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_lora.tasks.sandbox.scratch import PREFIX, remove_abandoned, scratch_folder

OWNER = """
import sys, tempfile
from areal_lora.tasks.sandbox.scratch import scratch_folder
with scratch_folder() as path:
    (path / "deep").mkdir()
    (path / "deep" / "file").write_text("x")
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_after_its_owner_was_killed_and_never_before(places: Path) -> None:
    environment = os.environ | {"TMPDIR": str(places)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment, "text": True}
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], **pipes) for _ in range(2)]
    killed, alive = (Path(owner.stdout.readline().strip()) for owner in owners)
    assert {killed.parent, alive.parent} == {places}
    remove_abandoned()
    assert (killed / "deep" / "file").exists()
    owners[0].kill()
    owners[0].wait()
    with scratch_folder() as mine:
        remove_abandoned()
        assert set(places.iterdir()) == {alive, mine}
    assert (alive / "deep" / "file").exists()
    for owner in owners:
        owner.communicate()
    assert list(places.iterdir()) == []


def test_what_only_has_the_name_is_not_touched(places: Path) -> None:
    (places / "elsewhere").mkdir()
    (places / "elsewhere" / "file").touch()
    (places / f"{PREFIX}link").symlink_to(places / "elsewhere")
    (places / f"{PREFIX}file").touch()
    (places / "areal-lora-reward-other").mkdir()
    before = sorted(places.rglob("*"))
    remove_abandoned()
    assert sorted(places.rglob("*")) == before


def test_a_file_system_without_locks_keeps_a_folder_from_being_removed(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError("no locks")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", refuse)
        folder = scratch_folder()
        path = folder.__enter__()
    remove_abandoned()
    assert path.is_dir()
    folder.__exit__(None, None, None)
    assert list(places.iterdir()) == []

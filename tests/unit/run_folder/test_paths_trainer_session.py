from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_lora.errors import CheckpointError
from areal_lora.run_folder.paths import RunFolder, raise_session


def test_each_start_has_the_next_number_and_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    folder = RunFolder(tmp_path)
    assert [raise_session(folder) for _ in range(3)] == [1, 2, 3]
    assert len(synced) == 6
    assert synced[1::2] == [tmp_path.name] * 3, "its name, too"


def test_a_file_without_a_number_is_an_error_with_its_path(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.trainer_session.write_text("many\n")
    with pytest.raises(CheckpointError, match=r"trainer_session: .*many.*fix: remove it"):
        raise_session(folder)


def test_a_folder_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"missing/trainer_session: No such file"):
        raise_session(folder)

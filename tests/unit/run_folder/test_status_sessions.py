"""Sessions of a Slurm job: nothing of an earlier one remains where the processes of the next look."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint, read_endpoint, read_secret
from areal_lora.run_folder.status import begin_session, forget_sessions


def test_the_next_session_finds_neither_the_endpoints_nor_the_secret_of_the_last(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path, "17-0"), RunFolder(tmp_path, "17-1")
    begin_session(first)
    publish_endpoint(first, "trainer", 0, {"store": 1})
    secret = read_secret(first)
    begin_session(second)
    assert read_endpoint(second, "trainer", 0) is None
    assert read_secret(second) != secret
    assert [path.name for path in first.sessions.iterdir()] == ["17-1"]
    publish_endpoint(first, "trainer", 0, {"store": 1})  # by a process that outlives its session
    assert read_endpoint(second, "trainer", 0) is None


def test_commands_outside_of_the_job_find_the_current_session(tmp_path: Path) -> None:
    assert RunFolder.current(tmp_path).secret.parent == tmp_path
    begin_session(RunFolder(tmp_path, "17-1"))
    assert RunFolder.current(tmp_path).secret.parent == tmp_path / "sessions" / "17-1"
    begin_session(RunFolder(tmp_path, ""))
    assert RunFolder.current(tmp_path).secret.parent == tmp_path
    assert not (tmp_path / "sessions").exists()


def test_a_process_is_in_the_session_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SESSION_VARIABLE, "17-2")
    folder = RunFolder.of(tmp_path)
    assert folder.secret == tmp_path / "sessions" / "17-2" / "secret"
    assert folder.config == tmp_path / "config.json", "what belongs to the whole run is not moved"


def test_forgetting(tmp_path: Path) -> None:
    for session in ("", "17-0"):
        begin_session(RunFolder(tmp_path, session))
    forget_sessions(RunFolder(tmp_path, ""))
    assert list(tmp_path.iterdir()) == []

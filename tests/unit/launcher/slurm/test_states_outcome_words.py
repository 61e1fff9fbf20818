"""What the job is asked to do: lines of the batch script, USR1 to a task, a later session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_lora.launcher.slurm import states
from areal_lora.launcher.slurm.states import REPLACED, Words
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import begin_session


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(states, "LOOK_S", 0.0)
    run = RunFolder(tmp_path, "17-0")
    begin_session(run)
    return run


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def test_nothing_then_the_first_word(folder: RunFolder, pipe: tuple[int, int]) -> None:
    heard = Words(pipe[0], folder)
    assert not heard.any()
    os.write(pipe[1], b"USR1\nTERM\n")
    assert heard.any()
    os.write(pipe[1], b"TERM\n")
    assert heard.any()
    assert heard.first == "USR1"


def test_the_end_of_the_script_is_an_end(folder: RunFolder, pipe: tuple[int, int]) -> None:
    os.close(pipe[1])
    heard = Words(pipe[0], folder)
    assert heard.any()
    assert heard.first == "TERM"


def test_usr1_to_a_task(folder: RunFolder, pipe: tuple[int, int]) -> None:
    heard = Words(pipe[0], folder)
    folder.requeue_request.touch()
    assert heard.any()
    assert heard.first == "USR1"


def test_a_later_session_replaces_this_one(folder: RunFolder, pipe: tuple[int, int]) -> None:
    heard = Words(pipe[0], folder)
    begin_session(RunFolder(folder.path, "17-1"))
    assert heard.any()
    assert heard.first == REPLACED

"""The desired state: written whole or not at all, promises kept, read again only when it was replaced."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_lora.errors import ConfigError
from areal_lora.run_folder import paths as module
from areal_lora.run_folder.paths import (
    DesiredAdapter,
    DesiredAdapters,
    DesiredPhase,
    DesiredWatch,
    RunFolder,
    read_desired,
    write_desired,
)

KILLED = """
import os, signal, sys
from areal_lora.run_folder.paths import DesiredAdapters, DesiredAdapter, write_desired
from areal_lora.run_folder.paths import RunFolder
real = getattr(os, sys.argv[2])
def dies(*args): os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[2], dies)
write_desired(RunFolder.of(sys.argv[1]), DesiredAdapters(generation=2))
"""


def one(name: str = "maths", incarnation: int = 1, phase: str = "active", **section: Any) -> DesiredAdapter:
    return DesiredAdapter(
        name=name, incarnation=incarnation, phase=DesiredPhase(phase), adapter={"rank": 8, "init_from": None} | section
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "a run")


def test_what_is_written_is_read_and_only_this_user_can_read_it(folder: RunFolder) -> None:
    assert read_desired(folder) == DesiredAdapters()
    wanted = DesiredAdapters(generation=3, adapters=(one(), one("b", 7, "paused", rank=4)), closed=True)
    write_desired(folder, wanted)
    assert read_desired(folder) == wanted
    assert [adapter.key for adapter in wanted.adapters] == ["maths.1", "b.7"]
    assert stat.S_IMODE(folder.desired.stat().st_mode) == 0o600
    assert [path.name for path in folder.path.iterdir()] == ["desired.json"]


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_writer_that_is_killed_leaves_the_old_state(folder: RunFolder, at: str) -> None:
    write_desired(folder, DesiredAdapters(generation=1, adapters=(one(),)))
    # Path.replace calls os.replace.
    died = subprocess.run([sys.executable, "-c", KILLED, str(folder), at], check=False)
    assert died.returncode == -9
    assert read_desired(folder).generation == 1
    write_desired(folder, DesiredAdapters(generation=2))
    assert read_desired(folder) == DesiredAdapters(generation=2)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (DesiredAdapters(generation=1), "generation 1 does not follow 1"),
        (DesiredAdapters(generation=2, adapters=(one("Maths"),)), "'Maths' is no name"),
        (DesiredAdapters(generation=2, adapters=(one("../x"),)), "is no name"),
        (DesiredAdapters(generation=2, adapters=(one(incarnation=0),)), "below 1"),
        (DesiredAdapters(generation=2, adapters=(one(), one(incarnation=2))), "2 adapters are named 'maths'"),
        (DesiredAdapters(generation=2, adapters=(one(), one(phase="deleted"))), "maths.1 is there 2 times"),
        (DesiredAdapters(generation=2, adapters=(one(name2="x", name="maths"),)), "the settings of maths.1 changed"),
        (DesiredAdapters(generation=2, adapters=(one(rank=4),)), "the settings of maths.1 changed"),
        (DesiredAdapters(generation=2, adapters=(one("gone"),)), "gone.1 was deleted"),
    ],
)
def test_a_state_that_breaks_a_promise_is_refused(folder: RunFolder, state: DesiredAdapters, says: str) -> None:
    before = DesiredAdapters(generation=1, adapters=(one(), one("gone", phase="deleted")))
    write_desired(folder, before)
    with pytest.raises(ConfigError, match=says):
        write_desired(folder, state)
    assert read_desired(folder) == before


def test_a_name_may_be_used_again_while_its_former_bearer_is_being_deleted(folder: RunFolder) -> None:
    write_desired(folder, DesiredAdapters(generation=1, adapters=(one(),)))
    write_desired(folder, DesiredAdapters(generation=2, adapters=(one(phase="deleted"), one(incarnation=2, rank=4))))
    assert [adapter.key for adapter in read_desired(folder).adapters] == ["maths.1", "maths.2"]


@pytest.mark.parametrize("text", ["", "{", '{"generation": "x"}', '{"generation": 1, "unknown": 2}', "[]", "\xff"])
def test_a_file_that_is_none_is_named(folder: RunFolder, text: str) -> None:
    folder.path.mkdir(parents=True)
    folder.desired.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"desired\.json"):
        read_desired(folder)


def test_a_watch_reads_only_what_was_replaced(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(module, "read_desired", lambda f: reads.append(f) or read_desired(f))
    watch = DesiredWatch(folder)
    assert [watch.look().generation for _ in range(3)] == [0, 0, 0]
    for generation in (1, 2, 3):
        write_desired(folder, DesiredAdapters(generation=generation))
        reads.clear()
        assert [watch.look().generation for _ in range(3)] == [generation] * 3
        assert len(reads) == 1
    os.utime(folder.desired)
    assert watch.look().generation == 3

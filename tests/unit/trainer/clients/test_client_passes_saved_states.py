"""Saved states on the disk: names, what can be loaded, what is loaded, and what a crash leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_lora.checkpoint.checkpoint_store import CheckpointStore, leftovers_in
from areal_lora.checkpoint.state import MANIFEST_FILE, PARTS, Disk
from areal_lora.errors import CheckpointError
from areal_lora.operations.protocol import LoadState, OperationFailure, StateResult
from areal_lora.processes import watched
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.clients.client_passes import load_saved, loadable, named, tidy_states
from tests.support.checkpoint.faulty_disk import FaultyDisk
from tests.support.checkpoint.helpers import SPEC, snapshot_of, state_of, tensors_of
from tests.support.distributed.spawn import run_ranks
from tests.support.solo_exchange import SoloExchange
from tests.support.trainer.control_ranks import load

BASE = "base"
ASKED = LoadState(adapter=SPEC.name, label="one", optimizer=True)


class Engine:
    """Keeps what it is given."""

    def load_state(self, adapter: str, parts: Any, step: int) -> None:
        self.found = (adapter, {part: dict(values) for part, values in parts.items()}, step)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "a run")
    made.path.mkdir()
    return made


def save(folder: RunFolder, version: int = 1, label: str = "one", disk: Disk | None = None) -> int:
    return CheckpointStore(folder, SoloExchange(), disk or Disk()).write(snapshot_of(version, 0), label)


def step_of(folder: RunFolder, label: str = "one") -> int:
    engine: Any = Engine()
    asked = LoadState(adapter=SPEC.name, label=label, optimizer=True)
    assert loadable(folder, asked, adapter(), BASE) == ""
    loaded = load_saved(engine, folder, asked, "b", SoloExchange())
    assert isinstance(loaded, StateResult)
    return loaded.step


def adapter(**changes: Any) -> Any:
    return SimpleNamespace(spec=SPEC if not changes else type(SPEC)(**{**fields(), **changes}))


def fields() -> dict[str, Any]:
    return {"name": "other", "base_model": "m", "rank": 2, "alpha": 4.0, "target_modules": SPEC.target_modules}


def test_names_are_no_paths() -> None:
    assert named("a.1", "n-7_x", "0") == ""
    for bad in ("", ".x", "../x", "a/b", "a b", "x" * 129, "-x", "a\n"):
        assert "is no name" in named("a", bad), bad


def test_a_state_is_loaded_with_moments_and_clock_or_without(folder: RunFolder) -> None:
    n_bytes = save(folder)
    engine: Any = Engine()
    own = (folder.saved_state(SPEC.name, "one") / "rank-0000.safetensors").stat().st_size
    assert load_saved(engine, folder, ASKED, "b", SoloExchange()) == StateResult(step=3, n_bytes=own)
    assert own < n_bytes, "its companion's file is none of it"
    name, parts, step = engine.found
    assert (name, step) == ("b", 3)
    expected = tensors_of(state_of(1, 0))
    for part in PARTS:
        for key, values in expected[part].items():
            np.testing.assert_array_equal(parts[part][key], values)
    bare = LoadState(adapter=SPEC.name, label="one", optimizer=False)
    assert load_saved(engine, folder, bare, "b", SoloExchange()).step == 0
    _, parts, step = engine.found
    assert step == 0
    np.testing.assert_array_equal(
        parts["weight"]["layers.0.q.lora_A.weight"], expected["weight"]["layers.0.q.lora_A.weight"]
    )
    assert not any(values.any() for part in PARTS[1:] for values in parts[part].values())


def test_what_cannot_be_loaded_is_said_before(folder: RunFolder) -> None:
    assert "is no name" in loadable(folder, LoadState(adapter="../a", label="one", optimizer=True), adapter(), BASE)
    assert loadable(folder, ASKED, adapter(), BASE) == "math has no saved state 'one'"
    save(folder)
    assert loadable(folder, ASKED, adapter(), BASE) == ""
    assert loadable(folder, ASKED, adapter(name="other"), BASE) == "", "another adapter of its shape"
    assert "another rank, alpha or other modules" in loadable(folder, ASKED, adapter(rank=4), BASE)
    assert "of another base model" in loadable(folder, ASKED, adapter(), "other")
    file = folder.saved_state(SPEC.name, "one") / "rank-0000.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert "cannot be read: rank-0000.safetensors is damaged" in loadable(folder, ASKED, adapter(), BASE)
    (file.parent / MANIFEST_FILE).write_bytes(b"{}")
    assert "cannot be read: the manifest" in loadable(folder, ASKED, adapter(), BASE)


@pytest.mark.slow
def test_a_state_that_one_rank_cannot_read_fails_on_every_rank(tmp_path: Path) -> None:
    """And no rank loads it, nor waits for another: rank 1 sees no folder, half of a file, an empty one, all of it."""
    folders = [tmp_path / name for name in ("absent", "half", "empty", "whole")]
    for folder in folders:
        for rank in range(2):
            (seen := RunFolder(folder / f"rank-{rank}")).path.mkdir(parents=True)
            save(seen)
        file = seen.saved_state(SPEC.name, "one") / "rank-0000.safetensors"
        match folder.name:
            case "absent":
                shutil.rmtree(file.parent)
            case "half":
                os.truncate(file, file.stat().st_size // 2)
            case "empty":
                os.truncate(file, 0)
    mine, others = run_ranks(load, 2, tmp_path, (folders,), timeout_s=200.0)
    assert mine == others
    for outcome, loaded in mine[:3]:
        assert isinstance(outcome, OperationFailure)
        assert outcome.reason.startswith("trainer rank 1 cannot read the saved state 'one': ")
        assert not loaded
    assert isinstance(mine[3][0], StateResult)
    assert mine[3][1] == [3]


KILLS = {"files_written": (3, 3), "manifest_written": (6, 3), "replacing": (6, None), "renamed": (6, 6)}
"""Steps of the state after a kill at the point and the next start: of a first save, and of one in place of another.

None: one of the two.
"""


@pytest.mark.parametrize("point", KILLS)
@pytest.mark.parametrize("replaces", [False, True])
def test_a_save_that_is_killed_leaves_a_whole_state_or_none(folder: RunFolder, point: str, replaces: bool) -> None:
    """A real kill; what is hidden is gone after the next start, and other states are as they were."""
    save(folder, 3, "other")
    if replaces:
        save(folder, 1)
    if (child := os.fork()) == 0:
        watched._plan = watched.parse(f"trainer.checkpoint.{point}:1:kill")
        save(folder, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    root = folder.saved_states / SPEC.name
    assert any(path.name.startswith(".") for path in root.iterdir()) == (point != "renamed")
    tidy_states(folder, Disk())
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert step_of(folder, "other") == 9
    if point == "files_written" and not replaces:
        assert loadable(folder, ASKED, adapter(), BASE) == "math has no saved state 'one'"
        return
    expected = KILLS[point][replaces]
    assert step_of(folder) in ((3, 6) if expected is None else (expected,))


def test_a_disk_that_fails_leaves_the_state_before_it(folder: RunFolder) -> None:
    """Each operation of a save in place of another fails once; what was acknowledged can be loaded in any case."""
    save(folder)
    counting = FaultyDisk()
    save(folder, 1, disk=counting)
    for n in range(1, len(counting.log) + 1):
        disk = FaultyDisk(n)
        shutil.rmtree(folder.saved_states)
        save(folder)
        operation = counting.log[n - 1]
        saved = False
        with contextlib.suppress(CheckpointError):
            saved = save(folder, 2, disk=disk) > 0
        assert saved == (operation[0] == "remove"), operation
        assert step_of(folder) in (3, 6), "it can be loaded at once"
        tidy_states(folder, Disk())
        expected = {"remove": (6,), "fsync": (3, 6)}.get(operation[0], (3,))
        assert step_of(folder) in expected, operation
        assert leftovers_in(folder.saved_states / SPEC.name) == []


def test_a_folder_that_cannot_be_tidied_is_said_with_its_path(folder: RunFolder) -> None:
    hidden = folder.saved_states / SPEC.name / ".one.0123abcd"
    hidden.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"injected.*\(fix: make the folder of saved states writable"):
        tidy_states(folder, FaultyDisk(1))
    tidy_states(folder, Disk())
    assert not hidden.exists()
    tidy_states(RunFolder(folder.path / "none"), Disk())

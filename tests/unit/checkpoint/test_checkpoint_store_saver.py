"""The saver thread: what waits for it, what it tells, when it gives up."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from areal_lora.checkpoint import checkpoint_store
from areal_lora.checkpoint.checkpoint_store import CheckpointSave, CheckpointStore, Saver, Snapshot
from areal_lora.checkpoint.recover import find
from areal_lora.checkpoint.state import Disk
from areal_lora.config.sections.run import CheckpointConfig
from areal_lora.errors import CheckpointError, PublishError, RolloutError
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef
from tests.support.checkpoint.helpers import SPEC, snapshot_of
from tests.support.solo_exchange import SoloExchange


class Held(Disk):
    """Stands still before the rename until told to go on; ``full`` refuses every write."""

    def __init__(self) -> None:
        self.arrived, self.go_on, self.full = threading.Event(), threading.Event(), False

    def about_to(self, operation: str, path: Path) -> None:
        if operation == "rename" and path.name != "newest":
            self.arrived.set()
            assert self.go_on.wait(120.0)
        if operation == "write" and self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


class Saving:
    def __init__(self, folder: Path, **config: int) -> None:
        self.disk, self.committed = Held(), list[str]()
        self.commit_error: Exception | None = None
        self.kept: list[CheckpointSave] = []
        self.saver = Saver(
            store=CheckpointStore(RunFolder(folder), SoloExchange(), self.disk),
            config=CheckpointConfig(**config),
            committed=self.commit,
            kept=self.kept.append,
        )

    def save(self, snapshot: Snapshot, label: str = "") -> CheckpointSave:
        save = self.saver.start(snapshot, label)
        self.saver.write(save, snapshot)
        return save

    def commit(self, ref: AdapterRef) -> None:
        if self.commit_error:
            raise self.commit_error
        self.committed.append(str(ref))


def test_the_step_is_not_committed_before_it_is_durable(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    save = saving.save(snapshot_of(1, 0))
    assert saving.disk.arrived.wait(120.0)
    assert not save.ended.wait(0.3)
    assert (saving.committed, find(RunFolder(tmp_path), SPEC.name).newest) == ([], None)
    saving.disk.go_on.set()
    assert saving.saver.join(SPEC.name) is save
    assert find(RunFolder(tmp_path), SPEC.name).ref.version == 1
    assert saving.committed == ["math@v1"]
    assert save.nbytes == sum(path.stat().st_size for path in tmp_path.rglob("*rank-*.safetensors")) > 0
    assert save.write_s >= 0.3
    assert not save.failed
    assert saving.saver.join(SPEC.name) is None  # nothing under way
    saving.saver.close()


def test_a_full_disk_is_survived_until_it_has_failed_too_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "MAX_FAILURES", 2)
    saving = Saving(tmp_path)
    saving.disk.go_on.set()
    saving.disk.full = True
    for version in (1, 2):
        saving.save(snapshot_of(version, 0))
        saving.saver.join(SPEC.name)
    saving.disk.full = False
    saving.save(snapshot_of(3, 0))
    saving.saver.join(SPEC.name)
    saving.disk.full = True
    for version in (4, 5):
        saving.save(snapshot_of(version, 0))
        saving.saver.join(SPEC.name)
    saving.save(snapshot_of(6, 0))
    with pytest.raises(CheckpointError, match=r"3 checkpoints of 'math' in a row .*at most 2 may fail"):
        saving.saver.join(SPEC.name)
    assert saving.committed == ["math@v3"]
    assert find(RunFolder(tmp_path), SPEC.name).ref.version == 3
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 5
    assert all("No space left on device" in w and "/checkpoints/math/.v00000" in w for w in warned)
    saving.saver.close()


def test_a_lost_peer_comes_out_of_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path)
    lost = PublishError("rank 1 is gone")

    def gather(data: bytes, timeout_s: float | None = None) -> list[bytes]:
        raise lost

    monkeypatch.setattr(saving.saver._store._exchange, "all_gather_bytes", gather)
    saving.disk.go_on.set()
    saving.save(snapshot_of(1, 0))
    with pytest.raises(PublishError, match="rank 1 is gone"):
        saving.saver.join(SPEC.name)


def test_what_the_commit_raised_comes_out_of_join(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.disk.go_on.set()
    saving.commit_error = RolloutError("the controller is away")
    saving.save(snapshot_of(1, 0))
    with pytest.raises(RolloutError, match="is away"):
        saving.saver.join(SPEC.name)
    saving.saver.close()


def test_what_a_client_saves_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said when it is durable or has failed, commits no step, and its failures end no adapter."""
    monkeypatch.setattr(checkpoint_store, "MAX_FAILURES", 0)
    saving = Saving(tmp_path)
    first = saving.save(snapshot_of(1, 0), "mine")
    assert saving.saver.pending(SPEC.name) is first
    assert saving.kept == []
    saving.disk.go_on.set()
    assert saving.saver.join(SPEC.name) is first
    assert saving.saver.pending(SPEC.name) is None
    saving.disk.full = True
    full = saving.save(snapshot_of(2, 0), "other")
    assert saving.saver.join(SPEC.name) is full
    assert saving.kept == [first, full]
    assert [(save.label, save.step, save.failed) for save in saving.kept] == [("mine", 3, False), ("other", 6, True)]
    assert first.nbytes > 0
    assert f"{tmp_path}/states/math/.other." in full.reason
    assert "No space left on device" in full.reason
    assert saving.committed == []
    assert find(RunFolder(tmp_path), SPEC.name).newest is None
    assert [path.name for path in (tmp_path / "states/math").iterdir()] == ["mine"]
    saving.saver.close()

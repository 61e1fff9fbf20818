"""An adapter is done once its last version is durable: a real saver on a disk that is full for a while, or for good."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.checkpoint.checkpoint_store import CheckpointSave, CheckpointStore, Saver
from areal_lora.checkpoint.recover import find
from areal_lora.checkpoint.state import Disk
from areal_lora.errors import CheckpointError
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer import loop
from areal_lora.trainer.adapter import ControllerState, TrainingState, build_adapter
from areal_lora.trainer.collective import next_work
from areal_lora.trainer.versions.checkpointing import Checkpointing
from areal_lora.trainer.work import Finish
from areal_lora.types import AdapterPhase, AdapterRef
from tests.support.checkpoint.helpers import state_of
from tests.support.rollout.helpers import NAME, config
from tests.support.solo_exchange import SoloExchange

STEPS = 6


class FullFor(Disk):
    """Refuses every new file of the first so many checkpoints; each has a folder of its own while it is written."""

    def __init__(self, checkpoints: int) -> None:
        self.checkpoints, self.seen = checkpoints, set[Path]()

    def about_to(self, operation: str, path: Path) -> None:
        if operation != "open" or not path.parent.name.startswith(".v"):
            return
        self.seen.add(path.parent)
        if len(self.seen) <= self.checkpoints:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


class Trainer:
    """One rank with a real saver; what the others do is only noted."""

    def __init__(self, folder: Path, full_for: int) -> None:
        self.log: list[str] = []
        self.config, self.control, self.run_folder = config("m", steps=STEPS), SoloExchange(), RunFolder(folder)
        store = CheckpointStore(self.run_folder, self.control, FullFor(full_for))
        saver = Saver(
            store=store, config=self.config.checkpoint, committed=lambda ref: self.log.append(f"commit {ref}")
        )
        self.engine: Any = SimpleNamespace(
            copy_state=lambda name, moments: (state_of(STEPS, 0), iter(())),
            base_digest=lambda: "base",
            device=torch.device("cpu"),
        )
        self.checkpointing = Checkpointing(self.config, self.engine, saver, {})
        self.publishing: Any = SimpleNamespace(join=lambda name: None)
        recorder = SimpleNamespace(phase=self._phase, checkpointed=self._checkpointed)
        driver = SimpleNamespace(state=lambda name: ControllerState(), end=lambda name, reason: None)
        auditor = SimpleNamespace(collect=lambda name, wait: None)
        turns = FairQueue({NAME: 1.0})
        self.rank_0: Any = SimpleNamespace(
            recorder=recorder, driver=lambda adapter: driver, auditor=auditor, turns=turns, controller=driver
        )
        adapter = build_adapter(self.config, self.config.adapters[0], [[1, 2, 3]])
        state = TrainingState(adapter=adapter, version=STEPS, phase=AdapterPhase.DRAINING)
        self.states = {NAME: state}
        self.checkpointing.save(state, ControllerState(), at_once=True)  # as the last step does

    def _phase(self, ref: AdapterRef, phase: AdapterPhase, reason: str) -> None:
        self.log.append(f"{ref} {phase}")

    def _checkpointed(self, save: CheckpointSave) -> None:
        self.log.append("not written" if save.failed else "written")

    @property
    def durable(self) -> int | None:
        newest = find(self.run_folder, NAME).newest
        return newest.manifest.version if newest else None


@pytest.fixture
def trainer_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(next_work, "RETRY_S", 0.0)
    made: list[Trainer] = []
    monkeypatch.setattr(loop, "export_adapter", lambda *_: made[0].log.append("exported"))

    def start(full_for: int) -> Trainer:
        made.append(Trainer(tmp_path, full_for))
        return made[0]

    yield start
    for each in made:
        each.checkpointing.close()


def drain(trainer: Any) -> None:
    loop.carry_out(trainer, trainer.states[NAME], Finish(adapter=NAME))


@pytest.mark.parametrize("full_for", [0, 1, 3])
def test_it_is_written_again_until_it_is_durable_and_only_then_exported(trainer_on: Any, full_for: int) -> None:
    trainer = trainer_on(full_for)
    drain(trainer)
    ref = f"{NAME}@v{STEPS}"
    assert trainer.log == ["not written"] * full_for + [f"commit {ref}", "written", "exported", f"{ref} done"]
    assert trainer.durable == STEPS
    assert trainer.states[NAME].phase is AdapterPhase.DONE


def test_on_a_disk_that_stays_full_the_adapter_fails_with_that_reason(trainer_on: Any) -> None:
    trainer = trainer_on(99)
    trainer.states["other"] = SimpleNamespace(name="other", phase=AdapterPhase.ACTIVE, failure=None)
    trainer.publishing.drop = lambda name: None
    trainer.engine.remove_adapter = lambda name: None
    drain(trainer)
    state = trainer.states[NAME]
    assert (state.phase, type(state.failure)) == (AdapterPhase.FAILED, CheckpointError)
    assert "4 checkpoints of 'math' in a row could not be written" in str(state.failure)
    assert "exported" not in trainer.log
    assert trainer.durable is None


def test_alone_it_ends_the_run_with_the_exit_code_of_a_disk(trainer_on: Any) -> None:
    with pytest.raises(CheckpointError) as failed:
        drain(trainer_on(99))
    assert failed.value.exit_code == CheckpointError.exit_code != 0

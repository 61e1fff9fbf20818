"""How far training goes while a checkpoint is being written: a real saver whose disk is held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_lora.checkpoint.checkpoint_store import CheckpointStore, Saver
from areal_lora.checkpoint.state import Disk
from areal_lora.config.sections.run import CheckpointConfig
from areal_lora.obs.trace import Spans
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.adapter import ControllerState, TrainingState, build_adapter
from areal_lora.trainer.collective.next_work import keep_pace, make_durable
from areal_lora.trainer.loop import save_and_publish
from areal_lora.trainer.versions.checkpointing import Checkpointing, due
from tests.support.checkpoint.helpers import state_of
from tests.support.rollout.helpers import NAME, config
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.thread_exchange import ThreadExchange

LAST = 100


@pytest.mark.parametrize(
    ("version", "newest", "every", "expected"),
    [
        (0, -1, 5, True),
        (4, 0, 5, False),
        (5, 0, 5, True),
        (5, 5, 5, False),
        (6, 5, 5, False),
        (7, 0, 5, True),  # v0 was being written when v5 was due
        (10, 7, 5, True),
        (9, 7, 5, False),
        (7, 6, 1, True),
        (LAST, 97, 5, True),
        (LAST, LAST, 5, False),
    ],
)
def test_when_a_version_gets_a_checkpoint(version: int, newest: int, every: int, expected: bool) -> None:
    run: Any = SimpleNamespace(checkpoint_every=every, steps=LAST)
    assert due(run, version, newest) is expected


class HeldDisk(Disk):
    def __init__(self) -> None:
        self.go_on = threading.Event()

    def about_to(self, operation: str, path: Path) -> None:
        if operation == "fsync":
            assert self.go_on.wait(120.0)


class Trainer:
    """One rank that takes steps; its checkpoints and commits are real."""

    def __init__(self, folder: Path, steps: int, **checkpoint: int) -> None:
        self.control, self.disk = SoloExchange(), HeldDisk()
        self.config = config("m", steps=steps).model_copy(update={"checkpoint": CheckpointConfig(**checkpoint)})
        self.committed: list[int] = []
        saver = Saver(
            store=CheckpointStore(RunFolder(folder), self.control, self.disk),
            config=self.config.checkpoint,
            committed=lambda ref: self.committed.append(ref.version),
        )
        engine: Any = SimpleNamespace(
            copy_state=lambda name, moments: (state_of(self.state.version, 0), iter(())),
            base_digest=lambda: "base",
            device=torch.device("cpu"),
        )
        self.checkpointing = Checkpointing(self.config, engine, saver, {})
        self.rank_0: Any = SimpleNamespace(
            recorder=SimpleNamespace(checkpointed=lambda save: None),
            driver=lambda adapter: SimpleNamespace(state=lambda name: ControllerState()),
        )
        self.state = TrainingState(adapter=build_adapter(self.config, self.config.adapters[0], [[1, 2, 3]]))
        self.save()

    def save(self) -> None:
        self.checkpointing.save(self.state, ControllerState(), at_once=True)

    def step(self) -> None:
        keep_pace(self, self.state)  # type: ignore[arg-type]
        self.state.version += 1
        self.save()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    trainers: list[Trainer] = []

    def make(**options: int) -> Trainer:
        trainers.append(Trainer(tmp_path, **options))
        return trainers[0]

    yield make
    for trainer in trainers:
        trainer.disk.go_on.set()
        trainer.checkpointing.close()


def test_the_request_of_an_evaluation_states_whether_the_version_has_a_checkpoint(made: Any) -> None:
    """Written or in progress: as a step starts the two."""
    trainer, requested = made(steps=15, every_steps=3), list[tuple[int, bool]]()
    driver = SimpleNamespace(
        state=lambda name: ControllerState(), evaluate_if_due=lambda ref, saved: requested.append((ref.version, saved))
    )
    trainer.rank_0.driver = lambda adapter: driver
    trainer.spans = {NAME: Spans()}
    trainer.publishing = SimpleNamespace(join=lambda name: None, publish=lambda adapter, version: None)
    save_and_publish(trainer, trainer.state)
    trainer.disk.go_on.set()
    for _ in range(6):
        trainer.checkpointing.join(NAME)
        trainer.state.version += 1
        save_and_publish(trainer, trainer.state)
    assert requested == [(version, version % 3 == 0) for version in range(7)]


@pytest.mark.parametrize(("every", "behind"), [(1, 0), (1, 3), (3, 2)])
def test_a_crash_repeats_no_more_steps_than_allowed(made: Any, every: int, behind: int) -> None:
    trainer = made(steps=15, every_steps=every, max_behind=behind)
    trainer.disk.go_on.set()
    trainer.checkpointing.join(NAME)
    trainer.disk.go_on.clear()
    for version in range(1, 1 + every + behind):
        trainer.step()
        assert (trainer.state.version, trainer.committed) == (version, [0])
    held = threading.Thread(target=trainer.step)
    held.start()
    held.join(0.2)
    assert held.is_alive()
    trainer.disk.go_on.set()
    held.join(120.0)
    assert not held.is_alive()
    trainer.checkpointing.join(NAME)
    trainer.disk.go_on.clear()
    while trainer.state.version < trainer.committed[-1] + every + behind:
        trainer.step()  # the disk holds nothing up that it has not held for so long
    trainer.disk.go_on.set()
    while trainer.state.version < 15:
        before = trainer.committed[-1]
        trainer.step()
        assert trainer.state.version - max(before, trainer.committed[-1]) <= every + behind
    trainer.checkpointing.join(NAME)
    make_durable(trainer, trainer.state)
    assert trainer.committed[-1] == 15, "the last version has one in any case"


def test_the_first_step_waits_for_the_first_checkpoint(made: Any) -> None:
    """A run that has steps and no checkpoint cannot resume."""
    trainer = made(steps=15, max_behind=3)
    threading.Timer(0.2, trainer.disk.go_on.set).start()
    trainer.step()
    assert trainer.committed[0] == 0


def test_all_ranks_join_where_rank_0_has_seen_the_end() -> None:
    """Another rank may have seen it earlier, or not yet."""
    joined: list[int] = []

    def rank(exchange: Any, ended: bool) -> None:
        event = threading.Event()
        if ended:
            event.set()
        save = SimpleNamespace(ended=event, label="")
        checkpointing = SimpleNamespace(
            pending=lambda name: save, join=lambda name: joined.append(exchange.rank), behind=lambda state: 2
        )
        settings = SimpleNamespace(checkpoint=SimpleNamespace(max_behind=3))
        trainer: Any = SimpleNamespace(checkpointing=checkpointing, config=settings, control=exchange, rank_0=None)
        adapter = SimpleNamespace(run=SimpleNamespace(checkpoint_every=1))
        keep_pace(trainer, SimpleNamespace(name="a", adapter=adapter))  # type: ignore[arg-type]

    for of_rank_0 in (False, True):
        joined.clear()
        exchanges = ThreadExchange.world(2)
        ends = [of_rank_0, not of_rank_0]
        threads = [threading.Thread(target=rank, args=pair) for pair in zip(exchanges, ends, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert sorted(joined) == ([0, 1] if of_rank_0 else [])

"""kill -9 of the queue wherever it writes, sends or acknowledges, and of the trainer: each step is made once."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from areal_lora.operations.protocol import OptimStep
from areal_lora.processes.watched import VARIABLE
from areal_lora.run_folder.paths import RunFolder, read_desired
from areal_lora.run_folder.rendezvous import create_secret
from tests.support.forks.starter import starter_of
from tests.support.operations.scripted_trainer import ScriptedTrainer
from tests.support.service.queue_life import Kept

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIFE, LIFE_S = "tests.support.service.queue_life", 240.0
STEPS = 5


@contextmanager
def followed(trainer: ScriptedTrainer, folder: RunFolder) -> Iterator[None]:
    """The trainer has the adapters of the desired state."""
    stop, here = threading.Event(), set[str]()

    def follow() -> None:
        while not stop.wait(0.02):
            for adapter in read_desired(folder).adapters:
                if adapter.key not in here:
                    here.add(adapter.key)
                    trainer.join(adapter.key)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def life(folder: RunFolder, fault: str) -> int:
    with tempfile.TemporaryFile() as output:
        arguments = [str(folder.path), str(STEPS)]
        code = starter_of(LIFE).start(LIFE, arguments, os.environ | {VARIABLE: fault}, output).wait(LIFE_S)
        output.seek(0)
        assert code in (0, -9), output.read().decode(errors="replace")
    return code


def test_each_step_is_made_once_over_any_deaths(tmp_path: Path) -> None:
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"AREAL_LORA_SEED={seed}")
    draw, folder = random.Random(seed), RunFolder(tmp_path / "a run")
    folder.path.mkdir()
    create_secret(folder)
    trainer = ScriptedTrainer(folder)
    try:
        with followed(trainer, folder):
            deaths = [life(folder, f"{point}:{draw.randint(1, most)}:kill") for point, most in drawn(draw)]
            trainer.crash()
            assert life(folder, "") == 0
            kept = msgspec.json.decode((folder.path / "client.json").read_bytes(), type=Kept)
            assert life(folder, "") == 0, "every request again, and every answer as before"
    finally:
        trainer.close()
    assert deaths == [-9] * 5, "each life was killed"
    assert [kept.answers[3 * step + 3] for step in range(STEPS)] == [f"step {step + 1} of 2" for step in range(STEPS)]
    [(model, _)] = trainer.disk.checkpoints.values()
    assert (model.steps, model.version) == (STEPS, 3 * STEPS)
    steps = [each.number for each in trainer.carried_out if isinstance(each.what, OptimStep)]
    assert steps == sorted(set(steps)), "no step was made twice"


def drawn(draw: random.Random) -> list[tuple[str, int]]:
    """Points, and how often each is at least reached in the life that is killed there."""
    first = [("queue.sending", 8), ("queue.acknowledging", 6)]
    later = [("queue.changed", 25), ("queue.committed", 25)]
    return [("service.recorded", 1), *draw.sample(first, 2), *draw.sample(later, 2)]

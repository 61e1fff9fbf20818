"""kill -9 of a trainer around each answer, each checkpoint and in the log's repetition: no step is lost or made twice.

The trainer is real but for its engine, the client is in this process and lives on.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from areal_lora.checkpoint.recover import find
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.operations.protocol import (
    Durable,
    Expects,
    Loss,
    OperationCompletion,
    OptimStep,
    Pass,
    Poison,
    SaveState,
    What,
)
from areal_lora.processes.watched import VARIABLE
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from tests.support.forks.starter import starter_of
from tests.support.operations.client import Client, datum

LIFE, LIFE_S = "tests.support.operations.side_life", 120.0
PASS = Pass(data=(datum([5, 9, 12, 7], [1.0, 0.5, 2.0]),), loss=Loss.CROSS_ENTROPY)
OTHER = Pass(data=(datum([8, 3, 17], [0.25, 1.0]),), loss=Loss.CROSS_ENTROPY)
STEP = OptimStep(lr=0.1, weight_decay=0.01)
SCRIPT: list[What] = [PASS, STEP, OTHER, PASS, STEP, OTHER, Poison(reason="x"), STEP, OTHER, STEP, SaveState(label="s")]
SCRIPT += [PASS, STEP] * 4
POINTS = {
    "computed, not answered": "trainer.operation.stepped:3",
    "answered, no checkpoint": "trainer.operation.settling:3",
    "a checkpoint without a manifest": "trainer.checkpoint.files_written:3",
    "a checkpoint of which no one knows": "trainer.operation.durable:3",
    "a window": "trainer.operation.passed:5",
}
REPEATED = ("trainer.operation.passed:1", "trainer.operation.stepped:1", "trainer.operation.settling:1")
"""What a life reaches first: in the repetition, where there is one."""


def followed(root: Path, faults: list[str]) -> tuple[Client, RunFolder]:
    """The client once all of its script is durable, over a life for each fault and one without."""
    folder = RunFolder(root / "a run")
    folder.path.mkdir(parents=True)
    create_secret(folder)
    client = Client(folder)
    client.begin("a.1", *SCRIPT)
    for fault in [*faults, ""]:
        client.expects.clear()
        with tempfile.TemporaryFile() as output:
            environment = os.environ | {VARIABLE: f"{fault}:kill" if fault else ""}
            life = starter_of(LIFE).start(LIFE, [str(root), "a"], environment, output)
            try:
                if fault:
                    assert life.wait(LIFE_S) == -9, fault
                else:
                    client.wait(lambda: client.durable("a.1")[-1:] == [len(SCRIPT)])
            finally:
                life.kill()
    client.close()
    return client, folder


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Client, RunFolder]:
    return followed(tmp_path_factory.mktemp("calm"), [])


def made(folder: RunFolder) -> dict[str, str]:
    """Checksums of the newest checkpoint's files."""
    newest = find(folder, "a.1").newest
    assert newest is not None
    return {entry.name: entry.blake2b for entry in newest.manifest.files}


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_over_deaths_all_is_as_if_undisturbed(calm: tuple[Client, RunFolder], tmp_path: Path, point: str) -> None:
    client, folder = followed(tmp_path, [point, *REPEATED])
    assert client.outcomes("a.1") == calm[0].outcomes("a.1")
    assert made(folder) == made(calm[1]), "weights and both moments, bit for bit"
    assert [record.step for record in read_metrics(folder).steps] == list(range(7)), "a record of each step"
    cut, first = 0, dict[int, object]()
    for message in client.heard:
        match message:
            case Durable(number=number):
                cut = max(cut, number)
            case Expects(number=number):
                assert number > cut, "what was cut is expected again"
            case OperationCompletion(number=number, outcome=outcome):
                assert first.setdefault(number, outcome) == outcome, "an answer has changed"

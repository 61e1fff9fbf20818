"""What is sent over connections that begin again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from areal_lora.operations.protocol import Expects, Loss, Operation, OperationCompletion, Pass, PassResult, ToTrainer
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.queue.queue import Outbox
from areal_lora.service.queue.queue_store import Transaction
from areal_lora.service.queue.requests import Train
from areal_lora.service.queue.sequencer import submit
from tests.support.service.ledger import Ledger

T = TypeVar("T")
SCORED = PassResult(logprobs=(), loss=0.0)


class Scene:
    """An outbox without a connection, and a model with four passes."""

    def __init__(self, folder: Path) -> None:
        self.ledger, self.sent = Ledger(), list[int]()
        self.model, self.adapter = self.ledger.model()
        for seq in range(1, 5):
            self.submit(seq)
        self.outbox = Outbox(RunFolder(folder), self.change)
        self.outbox.link.send = self.send  # type: ignore[method-assign]

    def submit(self, seq: int) -> None:
        action = Train(what=Pass(data=(), loss=Loss.DRO))
        self.ledger.change(lambda tx: submit(tx, "acme", self.model, seq, "f", action))

    async def change(self, work: Callable[[Transaction], T]) -> T:
        return self.ledger.change(work)

    async def send(self, message: ToTrainer) -> None:
        if isinstance(message, Operation):
            self.sent.append(message.number)

    async def after(self, *messages: Expects | OperationCompletion) -> list[int]:
        """The numbers that are sent once these messages have come together."""
        self.sent.clear()
        for message in messages:
            self.outbox._incoming.put_nowait(message)
        self.outbox.moved(self.adapter)
        for _ in range(100):
            await asyncio.sleep(0)
        return list(self.sent)

    def expects(self, number: int) -> Expects:
        return Expects(adapter=self.adapter, number=number)

    def completion(self, number: int) -> OperationCompletion:
        return OperationCompletion(adapter=self.adapter, number=number, outcome=SCORED)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def play(scene: Scene, script: Callable[[], object]) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(each()) for each in (scene.outbox.receive, scene.outbox.pump)]
        await script()  # type: ignore[misc]
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def test_nothing_is_sent_before_the_trainer_expects_it(scene: Scene) -> None:
    async def script() -> None:
        assert await scene.after() == []
        assert await scene.after(scene.completion(1)) == []
        assert await scene.after(scene.expects(2)) == [2, 3, 4]
        assert await scene.after() == [], "all are sent"
        scene.submit(5)
        assert await scene.after() == [5]

    play(scene, script)


def test_an_outcome_of_what_another_connection_sent_is_passed(scene: Scene) -> None:
    async def script() -> None:
        assert await scene.after(scene.expects(1), scene.completion(1), scene.completion(2)) == [3, 4]
        assert await scene.after(scene.expects(2)) == [2, 3, 4], "a new start counts"

    play(scene, script)

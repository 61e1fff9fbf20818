"""Both ends of the link over real sockets, and the trainer without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from areal_lora.operations.link import ServiceEnd
from areal_lora.operations.protocol import (
    Acknowledgement,
    Datum,
    Expects,
    Loss,
    Operation,
    OperationCompletion,
    OperationFailure,
    OptimStep,
    Pass,
    PassResult,
    Poison,
    Publish,
    PublishResult,
    StepResult,
    ToService,
    What,
)
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from tests.support.operations.scripted_trainer import ScriptedTrainer, scores

DATUM = Datum(tokens=np.array([3, 1, 4], "<i4").tobytes(), weights=np.array([1.0, 0.5], "<f4").tobytes())
PASS = Pass(data=(DATUM,), loss=Loss.CROSS_ENTROPY)
STEP = OptimStep(lr=1e-3)
WAIT_S = 120


class Service:
    """A service that keeps what it hears."""

    def __init__(self, run_folder: RunFolder) -> None:
        self.heard: list[ToService] = []
        self._news = asyncio.Event()
        self.end = ServiceEnd(run_folder, self._hear)

    def _hear(self, message: ToService) -> None:
        self.heard.append(message)
        self._news.set()

    async def send(self, adapter: str, first: int, *whats: What) -> None:
        for number, what in enumerate(whats, first):
            await self.end.send(Operation(adapter=adapter, number=number, what=what))

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not ready():
                self._news.clear()
                await self._news.wait()

    def outcomes(self, adapter: str) -> dict[int, object]:
        return {m.number: m.outcome for m in self.heard if isinstance(m, OperationCompletion) and m.adapter == adapter}


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.of(tmp_path / "a run")
    folder.path.mkdir()
    create_secret(folder)
    return folder


def play(run_folder: RunFolder, script: Callable[[ScriptedTrainer, Service], Awaitable[None]]) -> None:
    trainer = ScriptedTrainer(run_folder)

    async def main() -> None:
        service = Service(run_folder)
        running = asyncio.create_task(service.end.run())
        try:
            await script(trainer, service)
        finally:
            running.cancel()
            await asyncio.wait([running])

    try:
        asyncio.run(main())
    finally:
        trainer.close()


def test_operations_complete_in_order(run_folder: RunFolder) -> None:
    async def script(trainer: ScriptedTrainer, service: Service) -> None:
        trainer.join("a.1")
        await service.until(lambda: Expects(adapter="a.1", number=1) in service.heard)
        await service.send("a.1", 1, PASS, PASS, STEP, Publish(), PASS)
        await service.until(lambda: len(service.outcomes("a.1")) == 5)
        got = service.outcomes("a.1")
        assert list(got) == [1, 2, 3, 4, 5]
        assert got[1] == got[2] == scores((DATUM,), 0)
        assert got[3] == StepResult(step=1, grad_norm=2.0, skipped=False)
        assert got[4] == PublishResult(version=3)
        assert isinstance(got[5], PassResult)
        assert got[5] != got[1], "the step shows"

    play(run_folder, script)


def test_long_messages_arrive_whole_both_ways(run_folder: RunFolder) -> None:
    """Several frames, of which the last one is short."""
    tokens = np.arange(400_001, dtype="<i4")
    long = Datum(tokens=tokens.tobytes(), weights=np.ones(400_000, "<f4").tobytes())

    async def script(trainer: ScriptedTrainer, service: Service) -> None:
        trainer.join("a.1")
        await service.until(lambda: Expects(adapter="a.1", number=1) in service.heard)
        await service.send("a.1", 1, Pass(data=(long,), loss=Loss.CROSS_ENTROPY), PASS)
        await service.until(lambda: len(service.outcomes("a.1")) == 2)
        assert service.outcomes("a.1") == {1: scores((long,), 0), 2: scores((DATUM,), 0)}

    play(run_folder, script)


def test_after_a_crash_the_operations_after_the_checkpoint_are_expected(run_folder: RunFolder) -> None:
    async def script(trainer: ScriptedTrainer, service: Service) -> None:
        trainer.join("a.1")
        await service.until(lambda: Expects(adapter="a.1", number=1) in service.heard)
        await service.send("a.1", 1, PASS, STEP, PASS, Poison(reason="lost"))
        await service.until(lambda: len(service.outcomes("a.1")) == 4)
        service.heard.clear()
        await asyncio.to_thread(trainer.crash)
        await service.until(lambda: Expects(adapter="a.1", number=3) in service.heard)
        assert service.outcomes("a.1")[2] == StepResult(step=1, grad_norm=1.0, skipped=False), "said again"
        await service.end.send(Acknowledgement(adapter="a.1", number=2))
        await service.send("a.1", 3, PASS, Poison(reason="lost"), STEP, PASS, STEP)
        await service.until(lambda: 7 in service.outcomes("a.1"))
        poisoned = service.outcomes("a.1")[5]
        assert isinstance(poisoned, OperationFailure)
        assert "lost" in poisoned.reason
        assert service.outcomes("a.1")[7] == StepResult(step=2, grad_norm=1.0, skipped=False)

    play(run_folder, script)


def test_a_restarted_service_hears_what_it_has_not_acknowledged(run_folder: RunFolder) -> None:
    async def script(trainer: ScriptedTrainer, service: Service) -> None:
        trainer.join("a.1")
        await service.until(lambda: Expects(adapter="a.1", number=1) in service.heard)
        await service.send("a.1", 1, PASS, STEP)
        await service.until(lambda: len(service.outcomes("a.1")) == 2)
        await service.end.send(Acknowledgement(adapter="a.1", number=1))
        second = Service(run_folder)
        running = asyncio.create_task(second.end.run())
        await second.until(lambda: Expects(adapter="a.1", number=3) in second.heard)
        assert list(second.outcomes("a.1")) == [2]
        running.cancel()
        await asyncio.wait([running])

    play(run_folder, script)


def test_a_service_with_another_secret_hears_nothing(run_folder: RunFolder, tmp_path: Path) -> None:
    async def script(trainer: ScriptedTrainer, service: Service) -> None:
        trainer.join("a.1")
        await service.until(lambda: bool(service.heard))
        stranger_folder = RunFolder.of(tmp_path / "stranger")
        stranger_folder.endpoints.mkdir(parents=True)
        create_secret(stranger_folder)
        own = run_folder.endpoint("operations-0")
        stranger_folder.endpoint("operations-0").write_bytes(own.read_bytes())
        stranger = Service(stranger_folder)
        running = asyncio.create_task(stranger.end.run())
        await asyncio.sleep(1)
        assert not stranger.heard
        running.cancel()
        await asyncio.wait([running])

    play(run_folder, script)

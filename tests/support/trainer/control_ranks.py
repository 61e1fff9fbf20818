"""What each rank of a test does between steps: wait for work, and read a saved state. The exchange is a real one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.distributed.store import Exchange
from areal_lora.operations.protocol import LoadState, Outcome
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer import work
from areal_lora.trainer.adapter import ControllerState, TrainingState
from areal_lora.trainer.clients.client_passes import load_saved
from areal_lora.trainer.collective.next_work import next_work
from areal_lora.trainer.controller_link import ControllerLink
from areal_lora.trainer.work import Work
from areal_lora.types import AdapterPhase, AdapterRef
from tests.support.checkpoint.helpers import SPEC
from tests.support.rollout.helpers import NAME, config

TIMEOUT_S, IDLE_S, ROLLOUTS_S = 3.0, 0.1, 4.0


class LateRollouts:
    """A controller whose rollouts take `ROLLOUTS_S`, and fail."""

    def __init__(self) -> None:
        self._ended_s = time.monotonic() + ROLLOUTS_S

    def poll(self, wanted: Sequence[AdapterRef], wait_s: float) -> m.AdapterFailed | m.NotReady:
        time.sleep(0.05)
        if time.monotonic() < self._ended_s:
            return m.NotReady(lacking=())
        return m.AdapterFailed(adapter=NAME, reason="late")

    def take_events(self) -> tuple[m.EvalResult, ...]:
        return ()


def wait_for_rollouts() -> Work | None:
    """The work of this rank, after rollouts that take longer than the time-out of its exchange."""
    work.IDLE_S = IDLE_S
    run = config("m", eta=1)
    recorder: Any = SimpleNamespace(status=lambda _: None, beat=lambda: None)
    client: Any = LateRollouts()
    adapter: Any = SimpleNamespace(name=NAME, config=SimpleNamespace(is_client=False))
    exchange = Exchange(timeout_s=TIMEOUT_S)
    rank_0 = SimpleNamespace(
        controller=ControllerLink(run, client, recorder, {NAME: ControllerState()}),
        turns=FairQueue({NAME: 1.0}),
        desired=None,
        clients=None,
    )
    trainer: Any = SimpleNamespace(
        states={NAME: TrainingState(adapter=adapter, phase=AdapterPhase.ACTIVE)},
        control=exchange,
        rank_0=rank_0 if exchange.rank == 0 else None,
        publishing=SimpleNamespace(failed=lambda: None, changed=lambda: False, pending=lambda _: None),
    )
    return next_work(trainer)


class Engine:
    def __init__(self) -> None:
        self.loaded: list[int] = []

    def load_state(self, adapter: str, parts: Any, step: int) -> None:
        self.loaded.append(step)


def load(folders: Sequence[Path]) -> list[tuple[Outcome, list[int]]]:
    """For each folder what came of a state that is loaded there, and the steps that the engine has loaded.

    Rank 1 has a folder of its own: what a shared file system shows it.
    """
    exchange, found = Exchange(timeout_s=150.0), []
    for folder in folders:
        engine: Any = Engine()
        asked = LoadState(adapter=SPEC.name, label="one", optimizer=True)
        own = RunFolder(folder / f"rank-{exchange.rank}")
        found.append((load_saved(engine, own, asked, "b", exchange), engine.loaded))
    return found

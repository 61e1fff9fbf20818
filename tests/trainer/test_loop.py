"""Waiting for a batch, with parts that only say what was asked of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_lora.trainer.loop import next_batch
from areal_lora.types import TrajectoryGroup
from areal_lora.weight_sync.exchange import SoloExchange
from tests.rollout.helpers import config, episode, stream

GROUPS = [episode(stream().at(p), version=3).group for p in range(4)]


class Tenant:
    name, version = "math", 3


class Recorder:
    """Gives a batch unless something else is to be done first."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def next_groups(self, tenant: Tenant, interrupted: Callable[[], bool]) -> list[TrajectoryGroup] | None:
        self._log.append("wait")
        return None if interrupted() else GROUPS


class Publishing:
    def __init__(self, log: list[str], changes: int) -> None:
        self._log, self._changes = log, changes

    def changed(self) -> bool:
        return self._changes > 0

    def catch_up(self, tenant: Tenant) -> None:
        self._changes -= 1
        self._log.append(f"send {tenant.name}@v{tenant.version} again")


class Trainer:
    def __init__(self, changes: int) -> None:
        self.log: list[str] = []
        self.config = config("m", eta=1)
        self.tenants = [Tenant()]
        self.recorder: Any = Recorder(self.log)
        self.publishing: Any = Publishing(self.log, changes)
        self.control = SoloExchange()


def test_servers_that_come_or_go_while_a_batch_is_awaited_are_seen_to_before_it() -> None:
    trainer: Any = Trainer(changes=2)
    batch, histogram = next_batch(trainer, trainer.tenants[0])
    assert trainer.log == ["wait", "send math@v3 again"] * 2 + ["wait"]
    assert batch.n_sequences == 8
    assert set(histogram) == {0}

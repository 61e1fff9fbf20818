"""Waiting for a batch, with parts that only say what was asked of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lora.distributed.exchange import SoloExchange
from areal_lora.errors import AlignmentError
from areal_lora.obs.trace import Spans
from areal_lora.trainer.adapter import TrainingState
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.loop import save_and_publish
from areal_lora.trainer.waits import collect_audit, join_checkpoint, next_batch
from areal_lora.types import AdapterRef, TrajectoryGroup
from tests.support.checkpoint.helpers import ThreadExchange, on_ranks
from tests.support.rollout.helpers import config, episode, stream

GROUPS = [episode(stream().at(p), version=3).group for p in range(4)]
ADAPTER: Any = SimpleNamespace(name="math")
STATE = TrainingState(adapter=ADAPTER, version=3)


class Controller:
    """Gives a batch unless something else is to be done first."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def next_groups(self, ref: AdapterRef, interrupted: Callable[[], bool]) -> list[TrajectoryGroup] | None:
        self._log.append("wait")
        return None if interrupted() else GROUPS


class Publishing:
    def __init__(self, log: list[str], changes: int) -> None:
        self._log, self._changes = log, changes

    def changed(self) -> bool:
        return self._changes > 0

    def join(self, adapter: str) -> None:
        pass

    def catch_up(self, adapter: str) -> None:
        self._changes -= 1
        self._log.append(f"send {adapter} again")


class Trainer:
    def __init__(self, changes: int) -> None:
        self.log: list[str] = []
        self.config = config("m", eta=1)
        self.states = {"math": STATE}
        self.rank_0 = SimpleNamespace(controller=Controller(self.log))
        self.publishing: Any = Publishing(self.log, changes)
        self.control = SoloExchange()


def test_servers_that_come_or_go_while_a_batch_is_awaited_are_seen_to_before_it() -> None:
    trainer: Any = Trainer(changes=2)
    batch, histogram = next_batch(trainer, STATE)
    assert trainer.log == ["wait", "send math again"] * 2 + ["wait"]
    assert batch.n_sequences == 8
    assert set(histogram) == {0}


class Rank:
    """A trainer rank of which rank 0 joins late: its controller is away."""

    def __init__(self, exchange: ThreadExchange, log: list[str]) -> None:
        self.config, self.control, self.rank_0 = config("m", eta=1), exchange, None
        self.checkpointing: Any = self
        self.publishing: Any = self
        self.spans = {"math": Spans()}
        self._log = log

    def join(self, adapter: str) -> None:
        if self.control.rank == 0:
            time.sleep(0.3)
            self._log.append("rank 0 has joined")

    def save(self, adapter: Any, version: int, controller: Any) -> None:
        pass

    def publish(self, adapter: Any, version: int, save: Any) -> None:
        self._log.append("continues")


@pytest.mark.parametrize("what", [save_and_publish, join_checkpoint])
def test_no_rank_enters_other_collectives_before_rank_0_has_joined(what: Callable[..., None]) -> None:
    """Those have bounds that are shorter than what rank 0 may wait for the controller."""
    log: list[str] = []
    ranks = [Rank(exchange, log) for exchange in ThreadExchange.make(2)]

    def run(rank: int) -> None:
        what(ranks[rank], STATE)
        log.append("continues")

    assert on_ranks(run) == [None, None]
    assert log.index("rank 0 has joined") == 0


class Auditor:
    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit

    def collect(self, *, wait: bool) -> Audit | None:
        return self._audit


@pytest.mark.parametrize("error", ["", "rollout logprobs are shifted by one token"])
def test_what_a_server_says_of_a_batch_ends_all_ranks_alike(error: str) -> None:
    exchanges = ThreadExchange.make(2)
    audits: list[Audit | None] = [None, None]

    def run(rank: int) -> None:
        rank_0 = SimpleNamespace(auditor=Auditor(Audit(tokens=5, error=error))) if rank == 0 else None
        trainer: Any = SimpleNamespace(control=exchanges[rank], rank_0=rank_0)
        audits[rank] = collect_audit(trainer)

    ends = on_ranks(run)
    if error:
        assert [type(e) for e in ends] == [AlignmentError] * 2
        assert {str(e) for e in ends} == {error}
    else:
        assert ends == [None, None]
        assert audits == [Audit(tokens=5), None]

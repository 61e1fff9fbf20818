"""Which faults end one adapter, and what becomes of it; engine, servers and disk only note what is asked of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.errors import (
    AdapterRolloutError,
    AlignmentError,
    ArealLoraError,
    CheckpointError,
    NonFiniteError,
    ParityError,
    PublishError,
    RolloutError,
)
from areal_lora.trainer.adapter import TrainingState
from areal_lora.trainer.training_state import contained
from areal_lora.types import AdapterPhase


class Trainer:
    def __init__(self, *names: str) -> None:
        self.log: list[str] = []
        self.states = {name: self._state(name) for name in names}
        self.publishing: Any = SimpleNamespace(
            join=lambda name: self._note(f"join {name}"), drop=lambda name: self._note(f"drop {name}")
        )
        self.checkpointing = SimpleNamespace(join=lambda name: self._note(f"join checkpoint of {name}"))
        self.engine = SimpleNamespace(remove_adapter=lambda name: self._note(f"remove {name}"))
        self.config = SimpleNamespace(service=None)
        controller = SimpleNamespace(end=lambda name, reason: self._note(f"end {name}"))
        recorder = SimpleNamespace(phase=lambda ref, phase, reason: self._note(f"{ref} {phase}: {reason}"))
        turns = FairQueue(dict.fromkeys(names, 1.0))
        self.rank_0 = SimpleNamespace(driver=lambda adapter: controller, recorder=recorder, turns=turns)

    def _state(self, name: str) -> TrainingState:
        algorithm = SimpleNamespace(critic=None, reference=None)
        adapter: Any = SimpleNamespace(name=name, algorithm=algorithm)
        made = TrainingState(adapter=adapter, version=4)
        made.phase = AdapterPhase.ACTIVE
        return made

    def _note(self, what: str) -> None:
        self.log.append(what)


OWN = [AlignmentError("a"), NonFiniteError("n"), ParityError("p"), CheckpointError("c"), AdapterRolloutError("r")]


@pytest.mark.parametrize("error", OWN, ids=lambda e: type(e).__name__)
def test_a_fault_of_one_adapter_ends_that_one(error: ArealLoraError) -> None:
    trainer: Any = Trainer("a", "b")
    with contained(trainer, trainer.states["a"]):
        raise error
    a, b = trainer.states.values()
    assert (a.phase, a.failure) == (AdapterPhase.FAILED, error)
    assert (b.phase, b.failure) == (AdapterPhase.ACTIVE, None)
    assert trainer.log == [f"a@v4 failed: {error}", "join a", "join checkpoint of a", "drop a", "remove a", "end a"]
    assert trainer.rank_0.turns.order(["b"]) == ["b"]
    assert [state.failure for state in trainer.states.values() if state.failure] == [error]


def test_the_error_of_a_publish_beside_it_is_not_a_second_one() -> None:
    trainer: Any = Trainer("a", "b")

    def join(name: str) -> None:
        raise ParityError("of the version before")

    trainer.publishing.join = join
    with contained(trainer, trainer.states["a"]):
        raise NonFiniteError("first")
    assert str(trainer.states["a"].failure) == "first"


@pytest.mark.parametrize("error", [PublishError("servers"), RolloutError("controller"), RuntimeError("x")])
def test_a_fault_of_what_all_share_ends_the_run(error: Exception) -> None:
    trainer: Any = Trainer("a", "b")
    with pytest.raises(type(error)), contained(trainer, trainer.states["a"]):
        raise error
    assert [state.phase for state in trainer.states.values()] == [AdapterPhase.ACTIVE] * 2


def test_a_run_of_one_adapter_ends_with_its_fault() -> None:
    trainer: Any = Trainer("a")
    with pytest.raises(NonFiniteError), contained(trainer, trainer.states["a"]):
        raise NonFiniteError("n")
    assert trainer.log == []


def test_a_service_goes_on_without_adapters() -> None:
    trainer: Any = Trainer("a")
    trainer.config.service = object()
    with contained(trainer, trainer.states["a"]):
        raise NonFiniteError("n")
    assert trainer.states["a"].phase is AdapterPhase.FAILED
    assert trainer.log[-3:] == ["drop a", "remove a", "end a"]

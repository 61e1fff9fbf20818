"""Whose group starts next, with adapters that only count."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from areal_lora.rollout.controller.admission import Admission, Claim


@dataclass
class Adapter:
    """Has ``left`` groups to start."""

    left: int
    running: int = 0

    def start_one(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.running += 1
        return True


def admit(sequences: int, claims: dict[str, Claim], adapters: dict[str, Adapter]) -> dict[str, int]:
    admission = Admission(claims, adapters)
    admission.sequences = sequences
    admission.admit()
    return {name: adapter.running for name, adapter in adapters.items()}


def claims(**weights: float) -> dict[str, Claim]:
    return {name: Claim(sequences=8, weight=weight) for name, weight in weights.items()}


def test_one_adapter_has_all_places() -> None:
    """As many groups as begin while there is room: the last one may be larger than what is left."""
    assert admit(64, claims(a=1.0), {"a": Adapter(100)}) == {"a": 8}
    assert admit(65, claims(a=1.0), {"a": Adapter(100)}) == {"a": 9}


def test_places_follow_the_weights_while_all_want_some() -> None:
    assert admit(8 * 14, claims(a=1.0, b=2.0, c=4.0), {n: Adapter(100) for n in "abc"}) == {"a": 2, "b": 4, "c": 8}


def test_places_that_nobody_else_wants_are_used() -> None:
    assert admit(8 * 14, claims(a=1.0, b=2.0, c=4.0), {"a": Adapter(100), "b": Adapter(1), "c": Adapter(0)}) == {
        "a": 13,
        "b": 1,
        "c": 0,
    }


def test_sequences_count_and_not_groups() -> None:
    made = {"a": Claim(sequences=16, weight=1.0), "b": Claim(sequences=4, weight=1.0)}
    assert admit(64, made, {"a": Adapter(100), "b": Adapter(100)}) == {"a": 2, "b": 8}


def test_a_newcomer_gets_the_places_that_come_free_until_it_has_its_part() -> None:
    adapters = {"a": Adapter(100), "b": Adapter(0)}
    admission = Admission(claims(a=1.0, b=1.0), adapters)
    admission.sequences = 64
    admission.admit()
    assert adapters["a"].running == 8
    adapters["b"].left = 100
    for _ in range(6):
        adapters["a"].running -= 1  # one of its groups has ended
        admission.admit()
        assert sum(adapter.running for adapter in adapters.values()) == 8
    assert (adapters["a"].running, adapters["b"].running) == (4, 4)


@pytest.mark.parametrize("sequences", [0, 1])
def test_without_servers_nothing_starts(sequences: int) -> None:
    assert admit(sequences, claims(a=1.0), {"a": Adapter(9)}) == {"a": sequences}

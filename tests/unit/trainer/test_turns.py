"""Whose turn it is: shares of trained tokens, waits, joins, adapters without batches. A simulation, no clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from areal_lora.trainer.turns import Turns, before


def simulate(
    turns: Turns,
    steps: int,
    tokens: dict[str, Callable[[], int]],
    ready: Callable[[str, int], bool] = lambda name, step: True,
) -> tuple[Counter[str], dict[str, int]]:
    """(trained tokens, longest wait in steps) by adapter."""
    trained, waits, last = Counter[str](), dict.fromkeys(tokens, 0), dict.fromkeys(tokens, -1)
    for step in range(steps):
        name = next(n for n in turns.order(tokens) if ready(n, step))
        waits[name] = max(waits[name], step - last[name] - 1)
        last[name] = step
        n = tokens[name]()
        trained[name] += n
        turns.trained(name, n)
    return trained, waits


@pytest.mark.parametrize("seed", range(5))
def test_tokens_follow_the_weights_whatever_the_batches(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    sizes = {"a": 1000, "b": 300, "c": 5000}
    trained, _ = simulate(
        Turns(weights), 700, {n: (lambda n=n: round(sizes[n] * rng.uniform(0.5, 1.5))) for n in weights}
    )
    for name, weight in weights.items():
        assert trained[name] / sum(trained.values()) == pytest.approx(weight / 7, rel=0.05)


def test_equal_steps_take_turns_in_proportion() -> None:
    trained, waits = simulate(Turns({"a": 1.0, "b": 2.0, "c": 4.0}), 700, dict.fromkeys("abc", lambda: 10))
    assert trained == {"a": 1000, "b": 2000, "c": 4000}
    assert waits["a"] <= 7
    assert waits["c"] <= 2


def test_nobody_waits_for_an_adapter_without_a_batch_and_it_does_not_hold_up_the_others_later() -> None:
    turns = Turns({"a": 1.0, "b": 1.0, "c": 1.0})
    trained, _ = simulate(turns, 300, dict.fromkeys("abc", lambda: 10), lambda n, s: n != "c")
    assert trained == {"a": 1500, "b": 1500}
    trained, waits = simulate(turns, 30, dict.fromkeys("abc", lambda: 10))
    assert trained["c"] <= 10 * 10 + 3 * 10, "at most its part and one step for each other adapter"
    assert max(waits.values()) <= 4


def test_a_newcomer_begins_with_the_others() -> None:
    turns = Turns({"a": 1.0, "b": 1.0})
    simulate(turns, 100, dict.fromkeys("ab", lambda: 10))
    turns.join("c", 1.0)
    trained, _ = simulate(turns, 30, dict.fromkeys("abc", lambda: 10))
    assert trained == {"a": 100, "b": 100, "c": 100}
    turns.leave("a")
    trained, _ = simulate(turns, 30, dict.fromkeys("bc", lambda: 10))
    assert trained == {"b": 150, "c": 150}


def test_only_batches_of_earlier_turns_come_before_an_operation() -> None:
    order = ["a", "client.1", "b", "client.2", "c"]
    clients = {"client.1", "client.2"}
    assert before(order, clients, None) == ["a", "b", "c"]
    assert before(order, clients, "client.1") == ["a"]
    assert before(order, clients, "client.2") == ["a", "b"]
    assert before(["client.1", "a"], clients, "client.1") == []

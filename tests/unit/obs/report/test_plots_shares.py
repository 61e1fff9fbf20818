"""Shares of trained tokens over time, against sums by hand."""

from __future__ import annotations

import random

import pytest

from areal_lora.obs.metrics.records import ResumeRecord, StepRecord
from areal_lora.obs.report.plots import BARS, REST, Shares


def add(shares: Shares, name: str, time_s: float, tokens: int) -> None:
    shares.add(StepRecord(step=0, version=0, time_s=time_s, adapter=name, staleness={0: tokens}))


def test_a_bar_has_the_shares_of_its_span() -> None:
    shares = Shares(["a", "b"])
    for time_s, name, tokens in ((1.0, "a", 30), (2.0, "b", 10), (21.0, "a", 5), (39.5, "b", 9)):
        add(shares, name, time_s, tokens)
    assert shares.rows() == [  # 40 spans of a second in the least number of bars
        (5.0, {"a": 0.75, "b": 0.25}),
        (15.0, {"a": 0.0, "b": 0.0}),
        (25.0, {"a": 1.0, "b": 0.0}),
        (35.0, {"a": 0.0, "b": 1.0}),
    ]
    assert "seconds since the start" in shares.draw()


def test_a_long_run_keeps_its_shares_in_bounded_memory() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, names = random.Random(seed), ["a", "b", "c"]
    shares, tokens, time_s = Shares(names), dict.fromkeys(names, 0), 0.0
    for _ in range(5000):
        name, count = rng.choices(names, (4, 2, 1))[0], rng.randrange(1, 400)
        time_s += rng.expovariate(0.1)
        tokens[name] += count
        add(shares, name, time_s, count)
    rows = shares.rows()
    assert len(shares._tokens) <= BARS
    assert BARS / 2 - 1 <= len(rows) <= BARS
    assert all(sum(row.values()) == pytest.approx(1.0) for _, row in rows)
    assert time_s * 0.9 < rows[-1][0] < time_s * 1.1
    for name in names:
        mean = sum(row[name] for _, row in rows) / len(rows)
        assert mean == pytest.approx(tokens[name] / sum(tokens.values()), abs=0.05)
    assert "hours since the start" in shares.draw()


def test_many_adapters_are_drawn_as_the_largest_and_the_rest() -> None:
    shares = Shares([f"adapter-{i}" for i in range(20)])
    for i in range(20):
        add(shares, f"adapter-{i}", float(i), 100 - i)
    shares.add(ResumeRecord(adapter="adapter-1", version=3, time_s=7.0))
    drawn = shares.draw()
    assert [f">adapter-{i}<" in drawn for i in range(7)] == [True] * 6 + [False]
    assert f">{REST}<" in drawn
    assert drawn.count('class="mark"') == 1


def test_before_the_first_step_there_is_a_word_and_no_picture() -> None:
    assert "nothing recorded" in Shares(["a", "b"]).draw()

"""Spans add up, survive exceptions and restart."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from areal_lora.obs.trace import Spans


def test_spans_add_up_by_name_and_nest() -> None:
    ticks = count()
    spans = Spans(clock=lambda: float(next(ticks)))  # started at 0
    with spans.span("outer"):  # 1 .. 4
        with spans.span("inner"):  # 2 .. 3
            pass
    with spans.span("inner"):  # 5 .. 6
        pass
    assert spans.seconds == {"outer": 3.0, "inner": 2.0}
    assert spans.total_s == 7.0


def test_a_span_that_raises_is_measured() -> None:
    spans = Spans()
    with pytest.raises(ValueError, match="x"):
        with spans.span("train"):
            raise ValueError("x")
    assert spans.seconds["train"] >= 0


def test_restart_returns_the_old_and_begins_empty() -> None:
    spans = Spans()
    with spans.span("a"):
        pass
    assert spans.restart().keys() == {"a"}
    assert spans.seconds == {}


def test_what_is_taken_is_added_and_the_other_starts_anew() -> None:
    step, engine = Spans(), Spans()
    for seconds in (2.0, 3.0):
        engine.add("score", seconds)
        engine.counts["flops"] += 7
        step.take(engine)
    assert (step.seconds, dict(step.counts)) == ({"score": 5.0}, {"flops": 14})
    assert (engine.seconds, dict(engine.counts)) == ({}, {})
    step.restart()
    assert not step.counts


def test_a_profiler_sees_the_names() -> None:
    seen = []

    @contextmanager
    def label(name: str) -> Iterator[None]:
        seen.append(f"{name} starts")
        yield
        seen.append(f"{name} ends")

    with Spans(label=label).span("train"):
        seen.append("work")
    assert seen == ["train starts", "work", "train ends"]

"""Spans add up, survive exceptions and restart."""

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

"""Staging rests between buckets, so that it takes a share of the time and not all of it."""

from __future__ import annotations

import pytest

from areal_lora.weight_sync.server import reception
from areal_lora.weight_sync.server.reception import FREE_S, LONGEST_REST_S, Pace


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    rests: list[float] = []
    monkeypatch.setattr(reception.time, "sleep", rests.append)
    return rests


def test_work_takes_its_share_of_the_time(rests: list[float]) -> None:
    pace = Pace(0.04)
    for _ in range(4):
        pace.rest(FREE_S)
    assert rests == pytest.approx([24 * FREE_S] * 3), "the first is free"


def test_without_a_share_it_never_rests(rests: list[float]) -> None:
    Pace().rest(1.0)
    assert rests == []


def test_a_large_version_does_not_wait_for_ever(rests: list[float]) -> None:
    pace = Pace(0.01)
    for _ in range(100):
        pace.rest(0.1)
    assert sum(rests) == pytest.approx(LONGEST_REST_S)


def test_it_does_not_rest_over_the_deadline(rests: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception.time, "monotonic", lambda: 10.0)
    pace = Pace(0.01, deadline=10.4)
    pace.rest(1.0)
    monkeypatch.setattr(reception.time, "monotonic", lambda: 11.0)
    pace.rest(1.0)
    assert rests == pytest.approx([0.1])

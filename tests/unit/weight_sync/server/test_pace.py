"""Staging spreads over its budget while no one waits, and is done at once as soon as someone does."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import Bucket
from areal_lora.weight_sync.server.pace import SLICE_BYTES, Hurry, Pace, PacePlan
from tests.support.clocks import Clock

V1, V2 = (AdapterRef(name="a", version=v) for v in (1, 2))


def plan(pace_s: float, mib: int, deadline: float = 100.0) -> PacePlan:
    return PacePlan.of(pace_s, mib << 20, 0.0, deadline)


def test_a_slice_is_due_when_its_share_of_the_budget_has_passed() -> None:
    half = plan(0.5, 10)
    assert [half.rest_s(i << 20, 0.0) for i in (0, 1, 9)] == pytest.approx([0.0, 0.05, 0.45])


def test_a_late_slice_is_due_at_once_and_the_time_is_made_up_for() -> None:
    half = plan(0.5, 10)
    assert half.rest_s(4 << 20, 0.3) == 0.0, "0.1 s late"
    assert half.rest_s(7 << 20, 0.3) == pytest.approx(0.05), "on time again, not 0.1 s later"


def test_the_budget_ends_long_before_the_version_is_dropped() -> None:
    assert plan(10.0, 1, deadline=4.0).end == 2.0
    assert plan(1.0, 1, deadline=4.0).end == 1.0


@dataclass
class Work:
    """A writer on a virtual clock: each slice takes ``slice_s``; notes when each began."""

    clock: Clock
    slice_s: float
    begun: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Awaits(threading.Event):
    """Waiting moves the clock instead; the trainer waits from ``at`` on."""

    def __init__(self, clock: Clock, at: float = 1e9) -> None:
        super().__init__()
        self._clock, self._at = clock, at

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.now = max(self._clock.now, min(self._clock.now + timeout, self._at))
        return self._clock.now >= self._at


def written(
    pace_s: float | None, mib: int, slice_s: float = 0.001, awaited_at: float = 1e9, piece: int = 1 << 18
) -> Work:
    """Write ``mib`` in tensors of ``piece`` bytes and two buckets."""
    work = Work(Clock(), slice_s)
    nbytes = mib << 20
    ends = np.arange(piece, nbytes + 1, piece, dtype=np.int64)
    half = len(ends) // 2
    middle = int(ends[half - 1])
    pace = Pace(None if pace_s is None else plan(pace_s, mib), Awaits(work.clock, awaited_at), work.clock)
    for bucket in (
        Bucket(first=0, last=half, begin=0, end=middle),
        Bucket(first=half, last=len(ends), begin=middle, end=nbytes),
    ):
        expected = bucket.first
        for first, last in pace.slices(ends, bucket):
            assert first == expected, "every tensor once, in order"
            expected = last
            work.begun.append(work.clock.now)
            work.sizes.append((last - first) * piece)
            work.clock.now += slice_s * (last - first) * piece / SLICE_BYTES
        assert expected == bucket.last
    return work


def test_a_version_that_no_one_waits_for_takes_its_budget_whatever_its_size() -> None:
    for mib in (4, 40, 400):
        work = written(0.5, mib, slice_s=0.0002)
        assert max(work.sizes) <= SLICE_BYTES
        assert 0.5 * (1 - 1 / mib) <= work.clock.now <= 0.5, "and is not later than the budget's end"
        gaps = np.diff(work.begun)
        assert gaps.max() <= 1.01 * 0.5 / mib, "evenly"


def test_a_version_that_does_not_fit_its_budget_is_written_without_rests() -> None:
    work = written(0.5, 10, slice_s=0.1)
    assert work.clock.now == pytest.approx(1.0)


def test_from_the_moment_someone_waits_on_nothing_rests() -> None:
    work = written(0.5, 10, awaited_at=0.2)
    assert work.clock.now <= 0.2 + 0.001 * 10
    assert work.sizes[-1] > SLICE_BYTES, "and the rest is one slice"
    assert sum(work.sizes) == 10 << 20


def test_without_a_budget_a_bucket_is_one_slice() -> None:
    work = written(None, 10)
    assert work.sizes == [5 << 20] * 2
    assert work.clock.now == pytest.approx(0.01)


def test_a_tensor_larger_than_a_slice_is_one_slice() -> None:
    assert written(0.5, 64, piece=8 << 20).sizes == [8 << 20] * 8


def test_waiting_concerns_one_version_and_may_be_known_before_it_begins() -> None:
    hurry = Hurry()
    hurry.awaited(V2)
    first = hurry.begin(V1)
    assert not first.is_set()
    hurry.awaited(V1)
    assert first.is_set()
    hurry.awaited(V2)
    assert hurry.begin(V2).is_set()
    assert not hurry.begin(AdapterRef(name="b", version=2)).is_set()

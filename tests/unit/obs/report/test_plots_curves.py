"""Thinned curves keep every extreme and stay small."""

from __future__ import annotations

import random

import pytest

from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.report.plots import STRETCHES, Curve, Plots


def test_few_points_stay_as_they_are() -> None:
    curve, points = Curve(), [(float(i), float(i * i % 7)) for i in range(STRETCHES)]
    for point in points:
        curve.add(*point)
    assert curve.thinned() == points


def test_a_long_curve_keeps_its_spikes_and_its_ends() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for n in (STRETCHES + 1, 5000, 33_333):
        points = [(float(i), rng.gauss(0, 1)) for i in range(n)]
        spike, dip = rng.sample(range(n), 2)
        points[spike], points[dip] = (float(spike), 50.0), (float(dip), -50.0)
        curve = Curve()
        for point in rng.sample(points, n) if n == 5000 else points:
            curve.add(*point)
        kept = curve.thinned()
        assert len(kept) <= 4 * (STRETCHES + 1)
        assert set(kept) <= set(points)
        assert kept == sorted(kept)
        assert {points[0], points[-1], points[spike], points[dip]} <= set(kept)
        # Every stretch as wide as two of the kept ones has its own extremes.
        for begin in range(0, n, width := 4 * (n // STRETCHES + 1)):
            inside = [y for x, y in points if begin <= x < begin + width]
            near = [y for x, y in kept if begin - width <= x < begin + 2 * width]
            assert max(near) >= max(inside)
            assert min(near) <= min(inside)


def test_the_smoothed_line_of_a_short_run_is_the_moving_mean() -> None:
    curve = Curve()
    for i in range(6):
        curve.add(float(i), float(i * i))
    smooth = curve.smoothed()
    assert smooth[0] == (0.0, 0.5)
    assert smooth[2] == (2.0, pytest.approx((1 + 4 + 9) / 3))


def test_a_reason_counted_late_stands_at_zero_before() -> None:
    plots = Plots()
    for step in range(4):
        dropped = {"stale": step} | ({"timeout": 2} if step == 3 else {})
        plots.add(StepRecord(step=step, version=step, time_s=1.0, dropped=dropped))
    [chart] = [chart for title, _, chart in plots.draw() if title == "Groups dropped"]
    stale, timeout = [part.split('"')[0] for part in chart.split('points="')[1:]]
    levels = [float(point.split(",")[1]) for point in timeout.split()]
    assert levels[0] == levels[1] == float(stale.split()[0].split(",")[1])
    assert levels[2] < levels[1]

"""Thinned curves keep every extreme and stay small."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from areal_lora.obs.metrics.records import EvalRecord, StepRecord
from areal_lora.obs.report.plots import CHARTS, STRETCHES, Curve, Plots
from tests.support.paths import ROOT


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
    smooth = curve.smoothed("", 0).points
    assert smooth[0] == (0.0, 0.5)
    assert smooth[2] == (2.0, pytest.approx((1 + 4 + 9) / 3))


def test_a_tag_is_drawn_in_its_chart_under_what_distinguishes_it() -> None:
    plots = Plots()
    step = StepRecord(step=3, version=3, time_s=1.0, adapter="a", dropped={"stale": 2, "timeout": 1}, staleness={0: 3})
    plots.add(msgspec.structs.replace(step, metrics={"train/loss": 0.5, "reward/brief": 0.25, "own/tag": 1.0}))
    plots.add(EvalRecord(step=3, version=3, accuracy=0.5, n=8, name="hard", adapter="a", pass_at={4: 0.75}))
    texts = {title: re.findall(r'class="legend">(.*?)<', chart) for title, _, chart in plots.draw()}
    assert texts["Groups dropped"] == ["stale", "timeout"]
    assert texts["Reward by part"] == ["brief"]
    assert texts["Held-out accuracy"] == ["hard"]
    assert texts["Pass@k and majority"] == ["hard/pass@4"]
    assert texts["Loss"] == []
    assert texts["Staleness"] == ["max_staleness", "mean_lag"]
    assert all("own" not in chart for _, _, chart in plots.draw())


def test_the_tags_of_the_charts_are_those_of_the_recorder() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "areal_lora").rglob("*.py") if path.name != "plots.py")
    for chart in CHARTS:
        for name in (part for tag in chart.tags.split() for part in tag.split("/")[1:] if "*" not in part):
            assert name in sources or name.removesuffix("_s") in sources, f"{chart.title}: {name}"

"""Thinned curves keep every extreme and stay small."""

from __future__ import annotations

import random

import msgspec

from areal_lora.obs.metrics.records import CheckpointRecord, EvalRecord, StepRecord
from areal_lora.obs.report.charts import CHARTS, STEP, STRETCHES, VERSION, Charts, Curve
from tests.support.paths import ROOT


def points_of(curve: Curve) -> list[tuple[float, float]]:
    x, y = curve.thinned()
    return list(zip(x.tolist(), y.tolist(), strict=True))


def test_few_points_stay_as_they_are() -> None:
    curve, points = Curve(), [(float(i), float(i * i % 7)) for i in range(STRETCHES)]
    for point in points:
        curve.add(*point)
    assert points_of(curve) == points


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
        kept = points_of(curve)
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


def test_a_line_has_six_digits_and_its_x_may_be_scaled() -> None:
    curve = Curve()
    curve.add(120.0, 1 / 3)
    line = curve.line("a", 1 / 60)
    assert (line.name, line.x, line.y) == ("a", [2.0], [0.333333])


def test_an_empty_curve_has_an_empty_line() -> None:
    assert Curve().line("a").x == []


def test_a_tag_is_drawn_in_its_chart_under_what_distinguishes_it() -> None:
    charts = Charts()
    step = StepRecord(step=3, version=3, time_s=1.0, adapter="a", dropped={"stale": 2, "timeout": 1}, staleness={0: 3})
    charts.add(msgspec.structs.replace(step, metrics={"train/loss": 0.5, "reward/brief": 0.25, "own/tag": 1.0}))
    charts.add(EvalRecord(step=3, version=3, accuracy=0.5, n=8, name="hard", adapter="a", pass_at={4: 0.75}))
    charts.add(CheckpointRecord(version=4, write_s=0.5, adapter="a"))
    drawn = {chart.title: chart for chart in charts.data()}
    names = {title: [line.name for line in chart.lines] for title, chart in drawn.items()}
    assert names["Groups dropped"] == ["stale", "timeout"]
    assert names["Reward by part"] == ["brief"]
    assert names["Held-out accuracy"] == ["hard"]
    assert names["Pass@k and majority"] == ["hard/pass@4"]
    assert names["Loss"] == [""]
    assert names["Staleness"] == ["max_staleness", "mean_lag"]
    assert not [line for lines in names.values() for line in lines if "own" in line]
    assert (drawn["Loss"].x, drawn["Checkpoint"].x) == (STEP, VERSION)
    assert (drawn["Loss"].lines[0].x, drawn["Loss"].lines[0].y) == ([3.0], [0.5])
    assert drawn["Held-out accuracy"].dots
    assert drawn["Held-out accuracy"].unit


def test_values_outside_of_0_to_1_leave_the_axis_free() -> None:
    charts = Charts()
    for step, reward in enumerate((0.5, 1.5)):
        charts.add(StepRecord(step=step, version=step, time_s=1.0, metrics={"train/reward_mean": reward}))
    [reward_chart] = [chart for chart in charts.data() if chart.title == "Reward"]
    assert reward_chart.smooth
    assert not reward_chart.unit


def test_the_clock_has_the_time_and_the_tokens_trained_up_to_each_step() -> None:
    charts = Charts()
    for step, tokens in enumerate((30, 50)):
        charts.add(StepRecord(step=step, version=step, time_s=2.0 * step + 1, staleness={0: tokens}))
    clock = charts.clock()
    assert (clock.seconds.x, clock.seconds.y) == ([0.0, 1.0], [1.0, 3.0])
    assert (clock.tokens.x, clock.tokens.y) == ([0.0, 1.0], [30.0, 80.0])


def test_the_tags_of_the_charts_are_those_of_the_recorder() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "areal_lora").rglob("*.py") if path.name != "charts.py")
    for chart in CHARTS:
        for name in (part for tag in chart.tags.split() for part in tag.split("/")[1:] if "*" not in part):
            assert name in sources or name.removesuffix("_s") in sources, f"{chart.title}: {name}"

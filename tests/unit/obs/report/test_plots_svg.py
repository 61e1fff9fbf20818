"""Plots are well-formed, inside their frame and true to the values."""

import math
import random
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest

from areal_lora.obs.report import plots


def elements(chart: str, tag: str) -> list[ET.Element]:
    return list(ET.fromstring(chart).iter(tag))


def xy(chart: str) -> Iterator[list[tuple[float, float]]]:
    for line in elements(chart, "polyline"):
        yield [(float(x), float(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]


def test_a_line_maps_values_to_pixels_linearly() -> None:
    chart = plots.line_chart(
        [plots.Series(name="a", points=[(0, 0.0), (5, 0.5), (10, 1.0)])], x_label="x", y_range=(0, 1)
    )
    (points,) = xy(chart)
    bottom, top = plots.HEIGHT - plots.BOTTOM, plots.TOP
    assert points == [
        (plots.LEFT, bottom),
        (pytest.approx((plots.LEFT + plots.WIDTH - plots.RIGHT) / 2, abs=0.1), (bottom + top) / 2),
        (plots.WIDTH - plots.RIGHT, top),
    ]


def test_a_log_axis_puts_decades_at_equal_distances_and_drops_zero() -> None:
    series = plots.Series(name="a", points=[(0, 0.0), (1, 1e-6), (2, 1e-5), (3, 1e-4)])
    (points,) = xy(plots.line_chart([series], x_label="x", log_y=True))
    heights = [y for _, y in points]
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


def test_random_lines_stay_inside_the_frame() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        n, scale = rng.randint(1, 30), 10 ** rng.uniform(-9, 9)
        points = [(float(i), rng.gauss(0, scale)) for i in range(n)]
        chart = plots.line_chart([plots.Series(name="a", points=points)], x_label="x", log_y=rng.random() < 0.3)
        for line in xy(chart):
            for x, y in line:
                assert plots.LEFT - 0.1 <= x <= plots.WIDTH - plots.RIGHT + 0.1
                assert plots.TOP - 0.1 <= y <= plots.HEIGHT - plots.BOTTOM + 0.1


@pytest.mark.parametrize(
    "chart",
    [
        plots.line_chart([], x_label="x"),
        plots.line_chart([plots.Series(name="a", points=[(0, math.nan)])], x_label="x"),
    ],
)
def test_nothing_to_draw_says_so(chart: str) -> None:
    assert [t.text for t in elements(chart, "text")] == ["nothing recorded"]


def test_names_are_escaped() -> None:
    chart = plots.line_chart([plots.Series(name="<a&b>", points=[(0, 1.0)])], x_label="<x>")
    assert {"<a&b>", "<x>"} <= {t.text for t in elements(chart, "text")}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (5000, "5000"), (15000, "15k"), (2.5e6, "2.5M"), (1e-6, "1e-06"), (3e9, "3G")],
)
def test_tick_labels(value: float, text: str) -> None:
    assert plots.label(value) == text


def test_axes_end_on_round_ticks_that_cover_the_data() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        low = rng.uniform(-1, 1) * 10 ** rng.uniform(-6, 6)
        high = low + 10 ** rng.uniform(-6, 6)
        axis = plots.linear_axis(low, high, 0, 100)
        unseen = 1e-8 * (axis.high - axis.low)
        assert axis.low <= low + unseen
        assert axis.high >= high - unseen
        assert 2 <= len(axis.ticks) <= 8


def test_marks_stand_at_their_step_and_only_inside_the_axis() -> None:
    series = [plots.Series(name="a", points=[(0, 0.0), (10, 1.0)])]
    chart = plots.line_chart(series, x_label="x", marks=[5, 12])
    [mark] = [line for line in elements(chart, "line") if line.get("class") == "mark"]
    assert float(mark.attrib["x1"]) == float(mark.attrib["x2"])
    assert float(mark.attrib["x1"]) == pytest.approx((plots.LEFT + plots.WIDTH - plots.RIGHT) / 2, abs=0.1)

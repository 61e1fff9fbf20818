"""Shares of trained tokens over time, against sums by hand."""

from __future__ import annotations

from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.report.charts import MINUTES, Chart, RunCharts


def drawn(*steps: tuple[float, str, int]) -> list[Chart]:
    charts = RunCharts(["a", "b"])
    for time_s, name, tokens in steps:
        charts.add(StepRecord(step=0, version=0, time_s=time_s, adapter=name, staleness={0: tokens}))
    return charts.together([])


def test_a_point_is_the_share_of_all_tokens_so_far() -> None:
    [chart] = drawn((60.0, "a", 30), (120.0, "b", 10), (180.0, "a", 60), (240.0, "b", 100))
    assert (chart.title, chart.x, chart.unit) == ("Shares of trained tokens", MINUTES, True)
    assert [(line.name, line.x, line.y) for line in chart.lines] == [
        ("a", [1.0, 3.0], [1.0, 0.9]),
        ("b", [2.0, 4.0], [0.25, 0.55]),
    ]


def test_before_the_first_step_there_is_no_chart() -> None:
    assert drawn() == []

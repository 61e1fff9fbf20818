"""Shares of trained tokens over time, against sums by hand."""

from __future__ import annotations

import re

from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.report.plots import BOTTOM, HEIGHT, TOP, RunPlots


def drawn(*steps: tuple[float, str, int]) -> str:
    plots = RunPlots(["a", "b"])
    for time_s, name, tokens in steps:
        plots.add(StepRecord(step=0, version=0, time_s=time_s, adapter=name, staleness={0: tokens}))
    [(title, _, chart), _] = plots.together([])
    assert title == "Shares of trained tokens"
    return chart


def test_a_point_is_the_share_of_all_tokens_so_far() -> None:
    chart = drawn((60.0, "a", 30), (120.0, "b", 10), (180.0, "a", 60), (240.0, "b", 100))
    assert "minutes since the start" in chart
    lines = [[float(p.split(",")[1]) for p in line.split()] for line in re.findall(r'points="(.*?)"', chart)]
    height = HEIGHT - BOTTOM - TOP
    shares = [[round((HEIGHT - BOTTOM - y) / height, 2) for y in line] for line in lines]
    assert shares == [[1.0, 0.9], [0.25, 0.55]]


def test_before_the_first_step_there_is_a_word_and_no_picture() -> None:
    assert "nothing recorded" in drawn()

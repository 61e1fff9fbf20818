"""The report of a run with several adapters: an overview, and a section of each with its charts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_lora.obs.report.charts import Charts
from areal_lora.obs.report.page import write_report
from tests.support.obs.page import Page
from tests.support.obs.three_adapters import REASON, TOKENS, make_three, records


@pytest.fixture
def html(tmp_path: Path) -> str:
    return write_report(make_three(tmp_path)).read_text(encoding="utf-8")


def section(html: str, name: str) -> str:
    [found] = re.findall(rf'<section id="adapter-{name}">(.*?)</section>', html, flags=re.S)
    return str(found)


def test_the_overview_has_a_row_for_each_adapter_with_the_reason_of_a_failure(html: str) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", html.partition("<h2>The run</h2>")[0])
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]
    assert [row[:7] for row in cells] == [
        ["adapter", "state", "steps", "weight", "trained tokens", "accuracy", "best"],
        ["alpha", "done", "8 of 8", "2", "76%", "0.250 → 0.500", "0.750 (v4)"],
        ["beta", "failed", "3 of 8", "1", "14%", "0.250", "0.250 (v0)"],
        ["gamma", "done", "4 of 4", "1", "10%", "0.250 → 0.500", "0.500 (v4)"],
    ]
    assert [row[-2] for row in cells[1:]] == ["adapters/alpha", "-", "adapters/gamma"]
    assert cells[2][-1] == REASON.replace("<", "&lt;").replace(">", "&gt;")
    assert "3</b><span>adapters: 2 done, 1 failed" in html


def test_each_adapter_has_its_section_with_its_own_plots(html: str) -> None:
    page, figures = Page(html), 5
    for name in TOKENS:
        its = section(html, name)
        figures += its.count("<figure>")
        assert "Staleness" in its
    assert "failed after 3 of 8 steps: step 3: the advantage is not finite &lt;NaN&gt;" in section(html, "beta")
    assert "done after 4 of 4 steps · seed 7 · weight 1 · staleness up to 1" in section(html, "gamma")
    assert page.tags.count("figure") == figures
    inside = {one.head.answer: one.head.adapter for g in page.data.rollouts[0].groups for one in g.rollouts}
    assert {name: inside[f"written by {name}"] for name in TOKENS} == {name: name for name in TOKENS}


def test_the_charts_of_a_section_are_those_of_its_adapter_alone(html: str) -> None:
    """All charts of beta, against those made of its records only."""
    alone = Charts()
    for record in records():
        if record.adapter == "beta":
            alone.add(record)
    [its] = [found for found in Page(html).data.sections if found.id == "plots-beta"]
    assert its.charts == alone.data()
    assert its.clocks == {"beta": alone.clock()}


def test_what_compares_adapters_is_one_chart_each_of_all(html: str) -> None:
    found = {chart.title: [line.name for line in chart.lines] for chart in Page(html).data.sections[0].charts}
    names, evaluated = ["alpha", "beta", "gamma"], ["alpha held-out", "beta held-out", "gamma held-out"]
    assert found == {
        "Reward": names,
        "Held-out accuracy": evaluated,
        "Held-out reward": evaluated,
        "Learning rate": names,
        "Shares of trained tokens": names,
    }


def test_the_evaluations_of_several_adapters_name_them(html: str) -> None:
    table = html.partition("Evaluations, the last of each set")[2].partition("</table>")[0]
    assert re.findall(r"<tr><td>(\w+)</td><td>([\w-]+)</td><td>(v\d)</td>", table) == [
        ("alpha", "held-out", "v8"),
        ("beta", "held-out", "v0"),
        ("gamma", "held-out", "v4"),
    ]
    measured = ["accuracy", "reward mean", "unscored"]
    assert re.findall(r"<th>(.*?)</th>", table)[5:-3] == measured, "no column of a figure that no set has"


def test_a_run_that_has_not_begun_has_its_sections(tmp_path: Path) -> None:
    html = write_report(make_three(tmp_path, turns=0)).read_text(encoding="utf-8")
    assert "active after 0 of 8 steps" in section(html, "alpha")

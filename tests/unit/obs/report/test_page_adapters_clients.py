"""The report's section of an adapter that a client drives, alone and beside one with a data set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_lora.config.recorded import ENDLESS
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.report.charts import Charts
from areal_lora.obs.report.page import write_report
from tests.support.obs.page import Page
from tests.support.obs.with_client import CLIENT, client_records, make_with_client, repeated, written


@pytest.mark.parametrize("beside", [(), ("alpha",)])
def test_its_section_has_what_is_known_and_no_end(tmp_path: Path, beside: tuple[str, ...]) -> None:
    html = write_report(make_with_client(tmp_path, *beside)).read_text(encoding="utf-8")
    Page(html)
    assert str(ENDLESS) not in html
    [section] = re.findall(rf'<section id="adapter-{CLIENT}">(.*?)</section>', html, flags=re.S)
    assert "active after 3 steps · seed 7 · weight 2 · driven by a client" in section
    boxes = {label: value for value, label in re.findall(r"<b>(.*?)</b><span>(.*?)</span>", section)}
    assert boxes["optimizer steps"] == "3"
    assert boxes["publish, median"] == "30.0 ms"
    assert boxes["loss of the last step"] == "0.167"
    assert boxes["trained tokens"] == "400"
    assert not [label for label in boxes if "staleness" in label or "accuracy" in label or "rollout" in label]
    titles = re.findall(r"<figcaption>(.*?) <small>", section)
    assert titles[:5] == ["Loss", "Entropy and gradient norm", "Learning rate", "Tokens", "Step time"]
    assert "Publish" in titles
    assert not {"Reward", "Staleness", "Groups in flight"} & set(titles)


def test_the_tables_have_no_groups_of_it(tmp_path: Path) -> None:
    html = write_report(make_with_client(tmp_path, "alpha")).read_text(encoding="utf-8")
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    overview, groups = [row for row in rows if row[:1] == [CLIENT]][:2]
    assert overview[:5] == [CLIENT, "active", "3", "2", "33%"]
    assert groups[:9] == [CLIENT, *["-"] * 7, "1.0 MiB"]


def test_a_chart_has_a_point_for_each_step_and_no_marks() -> None:
    charts = Charts()
    for record in (*client_records(beside=False), *repeated(), *written()):
        charts.add(record)
    drawn = {chart.title: chart for chart in charts.data()}
    made = {r.step for r in (*client_records(beside=False), *repeated()) if isinstance(r, StepRecord)}
    assert set(drawn["Learning rate"].lines[0].x) == made
    assert drawn["Learning rate"].marks == []
    assert drawn["Publish"].marks == [9.0]

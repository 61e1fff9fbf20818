"""The live page over its routes: the token, what changed, what a resume makes void."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from areal_lora.cli.find_run import local_processes
from areal_lora.config.models import Config
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import Record, ResumeRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report import live
from areal_lora.obs.report.charts import Curve, RunCharts
from areal_lora.obs.report.inspector import GroupView, RolloutHead, RolloutPage
from areal_lora.obs.report.live import LiveRun, application
from areal_lora.obs.report.page import PageData, write_report
from areal_lora.obs.report.summary import RunFigures
from areal_lora.run_folder.paths import DesiredAdapter, DesiredAdapters, RunFolder, write_desired
from areal_lora.run_folder.status import forget_sessions, read_statuses
from tests.support.clocks import wait_until
from tests.support.obs.fake_run import ADAPTER, make_config, make_run
from tests.support.obs.page import Page
from tests.support.obs.records import step_record
from tests.support.obs.rollouts import keep, step_rollouts
from tests.support.obs.three_adapters import make_three

TOKEN = "a token"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(make_run(tmp_path / "run", steps=4))


@pytest.fixture
def client(folder: RunFolder) -> TestClient:
    return TestClient(application([folder], TOKEN))


def rewards(data: PageData) -> list[float]:
    [chart] = [chart for chart in data.sections[0].charts if chart.title == "Reward"]
    return chart.lines[0].y


def write(folder: RunFolder, step: int, reward: float) -> None:
    with MetricsWriter(folder) as writer:
        writer.write(step_record(step=step, version=step, time_s=99.0, adapter=ADAPTER, reward_mean=reward))


def test_without_the_token_nothing_is_served(client: TestClient) -> None:
    for path in ("/", "/data", "/other/", "/other/data", "/rollouts", "/group", "/rollouts.parquet", "/other/rollouts"):
        assert client.get(path).status_code == 404


def test_the_page_is_the_report_with_the_live_mark(client: TestClient) -> None:
    page = Page(client.get(f"/{TOKEN}/").text)
    assert ("data-live", "1") in page.attributes
    assert "Reward" in page.titles()
    assert "Now" in page.text


def test_the_process_beside_a_run_writes_its_address_for_the_owner_alone_and_ends_on_a_signal(
    folder: RunFolder,
) -> None:
    folder.metrics.unlink()  # nothing is recorded yet
    words = [sys.executable, "-m", "areal_lora.obs.report.live", "--run-folder", str(folder)]
    with subprocess.Popen(words) as page:
        try:
            wait_until(folder.page.exists)
            assert folder.page.stat().st_mode & 0o777 == 0o600
            address = folder.page.read_text().strip()
            with urllib.request.urlopen(address, timeout=120) as answer:
                assert "Now" in answer.read().decode()
            assert local_processes(folder) == {"page-0": page.pid}
            assert read_statuses(folder)["page-0"] == "serving the page"
            page.terminate()
            page.wait(120)
        finally:
            page.kill()
    forget_sessions(folder)
    assert not folder.page.exists()


def test_new_records_change_the_data_and_its_tag(client: TestClient, folder: RunFolder) -> None:
    first = client.get(f"/{TOKEN}/data")
    again = client.get(f"/{TOKEN}/data", headers={"If-None-Match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    write(folder, 4, 0.125)
    newer = client.get(f"/{TOKEN}/data", headers={"If-None-Match": first.headers["etag"]})
    before, after = (rewards(msgspec.json.decode(answer.content, type=PageData)) for answer in (first, newer))
    assert (newer.status_code, after) == (200, [*before, 0.125])


def test_steps_that_a_resume_makes_void_go(client: TestClient, folder: RunFolder) -> None:
    before = rewards(msgspec.json.decode(client.get(f"/{TOKEN}/data").content, type=PageData))
    with MetricsWriter(folder) as writer:
        writer.write(ResumeRecord(adapter=ADAPTER, version=3, time_s=50.0))
    write(folder, 3, 0.5)
    after = rewards(msgspec.json.decode(client.get(f"/{TOKEN}/data").content, type=PageData))
    assert after == [*before[:3], 0.5]


def test_a_step_that_comes_while_the_page_is_made_anew_counts_once(
    client: TestClient, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rewards(msgspec.json.decode(client.get(f"/{TOKEN}/data").content, type=PageData))

    def slow(*place: Any) -> Iterator[Record]:
        write(folder, 4, 0.5)
        yield from iter_metrics(*place)

    with MetricsWriter(folder) as writer:
        writer.write(ResumeRecord(adapter=ADAPTER, version=4, time_s=50.0))
    monkeypatch.setattr(live, "iter_metrics", slow)
    client.get(f"/{TOKEN}/data")
    monkeypatch.undo()
    assert rewards(msgspec.json.decode(client.get(f"/{TOKEN}/data").content, type=PageData)) == [*before, 0.5]


@pytest.mark.parametrize("at_start", [0, 1, 2])
def test_adapters_that_join_are_shown_as_on_a_page_that_is_opened_later(tmp_path: Path, at_start: int) -> None:
    """The last one to join has a step; the first has left, the page has known it if it was there at the start."""
    folder, data = RunFolder(tmp_path), make_config().model_dump(mode="json")
    settings = {key: value for key, value in data["adapters"][0].items() if key != "name"}
    generations = count(1)
    made = data | {"adapters": [], "service": {}, "rollout": {"max_adapters": 4, "max_lora_rank": 8}}
    folder.config.write_text(Config.model_validate(made).model_dump_json())
    names = ["a.1", "b.1", "c.1"]

    def desire(those: list[str]) -> None:
        adapters = (DesiredAdapter(name=name[0], incarnation=1, adapter=settings) for name in those)
        write_desired(folder, DesiredAdapters(generation=next(generations), adapters=tuple(adapters)))

    def train(those: list[str], step: int) -> None:
        with MetricsWriter(folder) as writer:
            for name in those:
                made = step_record(step=step, version=step, time_s=step, adapter=name, staleness={0: 10})
                writer.write(msgspec.structs.replace(made, metrics={"train/reward_mean": (step + ord(name[0])) / 200}))

    desire(names[:at_start])
    train(names[:at_start], 0)
    run = LiveRun(folder)
    run.refresh()
    desire(names)
    train(names, 1)
    assert run.refresh().data() == LiveRun(folder).refresh().data()
    assert {name: figures.steps for name, figures in run.page.figures.adapters.items()} == {
        name: 1 + (name in names[:at_start]) for name in names
    }
    desire(names[1:])
    train(names[1:], 2)
    page = run.refresh()
    assert (list(page.runs), page.figures.total.steps) == (names, 5 + at_start)
    desire([*names[1:], "d.1"])
    train(["d.1"], 0)
    page = run.refresh()
    assert set(page.runs) == {*names, "d.1"}, "one that has left stays"
    for name in names:
        [chart] = [c for c in page.charts.adapters[name].data() if c.title == "Reward"]
        steps = [*([0] if name in names[:at_start] else []), 1, *([2] if name != "a.1" else [])]
        assert (chart.lines[0].x, chart.lines[0].y) == (steps, [(s + ord(name[0])) / 200 for s in steps])


def test_only_charts_that_are_open_are_sent_and_only_lines_that_change_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_three(tmp_path)
    client = TestClient(application([folder], TOKEN))

    def data(*shown: str) -> PageData:
        answer = client.get(f"/{TOKEN}/data", params=[("open", one) for one in shown])
        return msgspec.json.decode(answer.content, type=PageData)

    places = [f"plots-{name}" for name in ("alpha", "beta", "gamma")]
    for shown in ([], places[1:2], places):
        found = data(*shown)
        assert [section.id for section in found.sections] == ["run", *shown]
        assert re.findall(r'class="plots" id="(.*?)"', found.body) == ["run", *shown]
        assert re.findall(r'data-plots="(.*?)"', found.body) == places, "what a reader can open"
    whole = Page(write_report(folder).read_text(encoding="utf-8")).data
    assert found.sections == whole.sections
    assert [section.id for section in Page(client.get(f"/{TOKEN}/").text).data.sections] == ["run"]
    drawn: list[Curve] = []
    thinned = Curve.thinned
    monkeypatch.setattr(Curve, "thinned", lambda curve: (drawn.append(curve), thinned(curve))[1])
    data(*places)
    assert drawn == [], "nothing is new"
    with MetricsWriter(folder) as writer:
        writer.write(step_record(step=4, version=4, time_s=40.0, adapter="gamma", reward_mean=0.5))
    [alpha, beta, gamma] = data(*places).sections[1:]
    assert [alpha, beta] == whole.sections[1:3]
    assert gamma.charts[0].lines[0].y == [*whole.sections[3].charts[0].lines[0].y, 0.5]
    # The reward twice, alone and beside the others, and its share, its clock and its staleness once.
    assert 0 < len(drawn) <= 8


@pytest.mark.parametrize(("adapters", "stretches"), [(1, 320), (16, 320), (64, 80), (1000, 32)])
def test_lines_have_fewer_points_beyond_sixteen_adapters(adapters: int, stretches: int) -> None:
    charts = RunCharts([str(i) for i in range(adapters)])
    for step in range(8000):
        charts.add(step_record(step=step, version=step, time_s=step, adapter="0", reward_mean=step * step % 997 / 997))
    assert stretches < len(charts.adapters["0"].data()[0].lines[0].x) <= 4 * (stretches + 1)


def test_a_page_of_one_adapter_has_no_records_of_others() -> None:
    """Those of one that had left before the page was opened; without a name a record is of the only one."""
    charts, figures = RunCharts(["a"]), RunFigures(["a"])
    for step, name in enumerate(("gone", "", "a")):
        record = step_record(step=step, version=step, time_s=step, adapter=name, reward_mean=0.5)
        charts.add(record)
        figures.add(record)
    assert charts.adapters["a"].data()[0].lines[0].x == [1, 2]
    assert (figures.adapters["a"].steps, figures.total.steps) == (2, 3)


def test_rollouts_are_queried_and_downloaded_of_the_run_that_is_named(tmp_path: Path) -> None:
    folders = [RunFolder(make_run(tmp_path / name, steps=3)) for name in ("one", "two")]
    client = TestClient(application(folders, TOKEN))
    keep(folders[1], [step_rollouts(2, adapter=ADAPTER, texts=["only here"])])

    def rows(**query: str) -> list[RolloutHead]:
        found = client.get(f"/{TOKEN}/rollouts", params=query)
        assert found.headers["cache-control"] == "no-store"
        return msgspec.json.decode(found.content, type=RolloutPage).rows

    data = msgspec.json.decode(client.get(f"/{TOKEN}/data").content, type=PageData)
    assert [(one.run, one.kept, one.groups) for one in data.rollouts] == [("fake (1)", 8, []), ("fake (2)", 16, [])]
    assert rows(text="only here") == []
    [head] = rows(run="1", text="only here", outcome="failed", step="2")
    place = {"run": "1", "adapter": ADAPTER, "step": str(head.step), "group": str(head.group)}
    view = msgspec.json.decode(client.get(f"/{TOKEN}/group", params=place).content, type=GroupView)
    assert [one.head.answer for one in view.rollouts][:1] == ["only here"]
    found = client.get(f"/{TOKEN}/rollouts.parquet", params={"run": "1", "outcome": "solved"})
    table = pq.read_table(io.BytesIO(found.content))
    assert (len(table), set(table["solved"].to_pylist())) == (8, {True})
    for bad in ({"run": "2"}, {"step": "x"}, {"outcome": "other"}, {"unknown": "1"}):
        assert client.get(f"/{TOKEN}/rollouts", params=bad).status_code == 400

"""The live page over its routes: the token, what changed, what a resume makes void."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from areal_lora.obs.metrics.records import ResumeRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.live import application
from areal_lora.obs.report.page import PageData
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import ADAPTER, make_run
from tests.support.obs.page import Page
from tests.support.obs.records import step_record

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
    for path in ("/", "/data", "/other/", "/other/data"):
        assert client.get(path).status_code == 404


def test_the_page_is_the_report_with_the_live_mark(client: TestClient) -> None:
    page = Page(client.get(f"/{TOKEN}/").text)
    assert ("data-live", "1") in page.attributes
    assert "Reward" in page.titles()
    assert "Now" in page.text


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

"""The live page over its routes: the token, what changed, what a resume makes void."""

from __future__ import annotations

import io
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from areal_lora.cli.find_run import local_processes
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import Record, ResumeRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report import live
from areal_lora.obs.report.inspector import GroupView, RolloutHead, RolloutPage
from areal_lora.obs.report.live import application
from areal_lora.obs.report.page import PageData
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import forget_sessions, read_statuses
from tests.support.clocks import wait_until
from tests.support.obs.fake_run import ADAPTER, make_run
from tests.support.obs.page import Page
from tests.support.obs.records import step_record
from tests.support.obs.rollouts import keep, step_rollouts

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

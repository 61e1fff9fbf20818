"""The page in a real Chromium: as a file of 10,000 steps, live, with what hostile models wrote, on a phone."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from areal_lora.obs.metrics.records import RolloutSampleRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import write_report
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import set_status
from tests.support.obs.browser import Visit, chromium, why_not
from tests.support.obs.fake_run import ADAPTER, make_run
from tests.support.obs.records import step_record
from tests.support.obs.three_adapters import make_three

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if reason := why_not():
        pytest.skip(reason)
    with chromium() as found:
        yield found


def test_ten_thousand_steps_are_drawn_without_a_request_or_an_error(browser: Browser, tmp_path: Path) -> None:
    folder, rng = RunFolder(make_run(tmp_path, steps=1)), random.Random(0)
    with folder.metrics.open("ab") as file:
        for step in range(1, 10_000):
            level = min(1.0, rng.random() / 2 + step / 20_000)
            record = step_record(step=step, version=step, time_s=2.0 * step, adapter=ADAPTER, reward_mean=level)
            file.write(msgspec.json.encode(record) + b"\n")
    report = write_report(folder)
    began = time.monotonic()
    visit = Visit(browser, report.as_uri())
    visit.wait("[...drawn.values()][0].plot")
    print(f"{report.stat().st_size} bytes, first charts after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 20
    visit.scroll_through()
    assert visit.requests == [report.as_uri()]
    assert visit.problems == []
    # The lines of the charts have the points that the page was given.
    first = visit.page.evaluate("data.sections[0].charts[0].lines[0].y.slice(0, 5)")
    assert visit.page.evaluate("[...drawn.values()][0].plot.data[1].slice(0, 5)") == first


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light")])
def test_nothing_leaves_the_window(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    report = write_report(make_three(tmp_path))
    visit = Visit(browser, report.as_uri(), width, scheme)
    visit.scroll_through()
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    background = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 27, 34)")
    assert visit.problems == []


def test_what_models_write_is_text(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path, steps=3)
    attack = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
    texts = [attack, "</pre></main></body>" + attack, "\u202eright to left\u202c", "\x00\x1b[31mred\x07", "x" * 10**6]
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for text in texts:
            writer.write(RolloutSampleRecord(step=1, prompt=text, completion=text, reward=1.0, gold=text[:100]))
    set_status(RunFolder(tmp_path), "trainer", 0, attack)
    report = write_report(tmp_path)
    visit = Visit(browser, report.as_uri())
    visit.scroll_through()
    assert visit.page.evaluate("window.attacked") is None
    assert attack in visit.page.inner_text("body")
    assert visit.requests == [report.as_uri()]
    assert visit.problems == []


def test_controls_change_axis_scale_and_zoom(browser: Browser, tmp_path: Path) -> None:
    visit = Visit(browser, write_report(make_run(tmp_path)).as_uri())
    page, spread = visit.page, "[e.plot.scales.x.min, e.plot.scales.x.max]"
    visit.wait("[...drawn.values()][0].plot")
    assert visit.charts(spread)[0] == [0, 39]
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20, steps=4)
    page.mouse.up()
    low, high = visit.charts(spread)[0]
    assert 5 < low < high < 25
    page.keyboard.press("0")
    assert visit.charts(spread)[0] == [0, 39]
    page.keyboard.press("x")
    assert page.input_value("#axis") == "tokens"
    assert visit.charts(spread)[0] == [1000, 40000]
    page.keyboard.press("x")
    assert visit.charts(spread)[0][1] == pytest.approx(80 / 60)
    assert visit.charts("e.plot.series.length")[0] == 3, "raw and smoothed"
    page.locator("#tools input").fill("0")
    assert visit.charts("e.plot.series.length")[0] == 2
    page.get_by_role("button", name="Reward: log axis", exact=True).click()
    assert visit.charts("e.plot.scales.y.distr")[0] == 3
    assert visit.problems == []


def test_a_live_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run", steps=4))
    command = [sys.executable, "-m", "areal_lora", "page", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            [address] = re.findall(r"http://127\.0\.0\.1:\d+/\S+/", server.stdout.readline())
            visit = Visit(browser, address)
            visit.wait("[...drawn.values()][0].plot")
            visit.page.click("summary")
            began = time.monotonic()
            with MetricsWriter(folder) as writer:
                writer.write(step_record(step=4, version=4, time_s=9.0, adapter=ADAPTER, reward_mean=0.123))
            visit.wait("[...drawn.values()][0].plot.data[1].includes(0.123)")
            visit.wait("document.body.innerText.includes('5/40')")
            print(f"shown {time.monotonic() - began:.2f} s after the step")
            assert visit.page.evaluate("document.querySelector('details').open")
            assert visit.page.inner_text("#state") == "live"
            assert {url.removeprefix(address) for url in visit.requests} == {"", "data"}
            assert visit.problems == []
        finally:
            server.terminate()
        server.wait(20)
    visit.wait("document.getElementById('state').textContent.startsWith('not live')")

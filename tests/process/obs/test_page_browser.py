"""The page in a real Chromium: as a file of 10,000 steps, live, with what hostile models wrote, on a phone."""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow.parquet as pq
import pytest

from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import write_report
from areal_lora.obs.report.summary import write_summary
from areal_lora.obs.report.version_answers import VersionAnswers, save_answers
from areal_lora.run_folder.events import EndEvent, write_event
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import set_status
from areal_lora.types import Outcome
from tests.support.cli.command import forked_python
from tests.support.obs.browser import Visit, chromium, why_not
from tests.support.obs.fake_run import ADAPTER, make_run
from tests.support.obs.records import step_record
from tests.support.obs.rollouts import keep, step_rollouts
from tests.support.obs.three_adapters import make_three
from tests.support.sizes import sample

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if reason := why_not():
        pytest.skip(reason)
    with chromium() as found:
        yield found


@contextmanager
def live_page(folder: RunFolder) -> Iterator[str]:
    """Serve the page of a run; the address."""
    command = [forked_python(), "-m", "areal_lora", "page", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            [address] = re.findall(r"http://127\.0\.0\.1:\d+/\S+/", server.stdout.readline())
            yield address
        finally:
            server.terminate()
        server.wait(120)


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
    assert time.monotonic() - began < 60
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
    visit.page.emulate_media(media="print")
    assert not visit.page.locator("#tools").is_visible(), "controls are not printed"
    assert visit.page.locator("figure").first.is_visible()
    assert visit.problems == []


@pytest.mark.parametrize("width", [1280, 400])
def test_adapters_are_compared_and_one_is_shown_when_chosen(browser: Browser, tmp_path: Path, width: int) -> None:
    visit = Visit(browser, write_report(make_three(tmp_path)).as_uri(), width)
    page, figures = visit.page, visit.page.locator("figure:visible")
    titles = ["Reward", "Held-out accuracy", "Held-out reward", "Learning rate", "Shares of trained tokens"]
    captions = page.locator("figure:visible figcaption").all_inner_texts()
    assert all(text.startswith(title) for text, title in zip(captions, titles, strict=True))
    assert page.evaluate("[...drawn.values()].filter((e) => e.plot && e.section.id !== 'run').length") == 0
    page.locator("#adapter-alpha summary").click()
    page.locator("#plots-alpha figure").first.scroll_into_view_if_needed()
    visit.wait("[...drawn.values()].some((e) => e.plot && e.section.id === 'plots-alpha')")
    assert figures.count() == len(titles) + page.locator("#plots-alpha figure").count()
    assert visit.problems == []


def test_the_charts_of_an_adapter_follow_the_run_while_they_are_open(browser: Browser, tmp_path: Path) -> None:
    folder = make_three(tmp_path, turns=8)
    with live_page(folder) as address:
        visit = Visit(browser, address)
        assert visit.page.evaluate("data.sections.map((one) => one.id)") == ["run"]
        visit.page.locator("#adapter-alpha summary").click()
        visit.wait("document.querySelector('#plots-alpha figure')")
        visit.page.locator("#plots-alpha figure").first.scroll_into_view_if_needed()
        visit.wait("[...drawn.values()].some((e) => e.plot && e.section.id === 'plots-alpha')")
        with MetricsWriter(folder) as writer:
            writer.write(step_record(step=4, version=4, time_s=40.0, adapter="alpha", reward_mean=0.125))
        visit.wait("data.sections[1]?.charts[0].lines[0].y.at(-1) === 0.125")
        assert visit.page.evaluate("data.sections.map((one) => one.id)") == ["run", "plots-alpha"]
        assert visit.page.locator("#plots-alpha").is_visible()
        visit.page.locator("#adapter-alpha summary").click()
        visit.wait("data.sections.length === 1")
        assert visit.problems == []


def test_cells_of_a_table_have_room_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    folder = make_three(tmp_path)
    set_status(folder, "trainer", 0, "computes gradients of alpha, step 3")
    set_status(folder, "server", 0, "generates for 12 groups of three adapters, " * 8)
    visit = Visit(browser, write_report(folder).as_uri(), width=400)
    cells = visit.page.evaluate(
        "[...document.querySelectorAll('#main td')].map((one) => { const text = document.createRange();"
        " text.selectNodeContents(one); const box = text.getBoundingClientRect();"
        " return [one.innerText, box.width, box.height]; })"
    )
    assert [text for text, _, high in cells if len(text) < 20 and high > 40] == [], "a short text has one line"
    assert max(width for _, width, _ in cells) <= 400, "a long one is read without scrolling"
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 400


LOOKS = [*product(("running", "failed", "finished"), (1, 3), (1280, 400), ("light", "dark"))]


@pytest.mark.parametrize(("state", "adapters", "width", "scheme"), sample(LOOKS, 0, lambda look: look))
def test_all_can_use_it(browser: Browser, tmp_path: Path, state: str, adapters: int, width: int, scheme: str) -> None:
    """axe-core finds no serious fault in the charts, the inspector and an open group."""
    folder = make_three(tmp_path, turns=8) if adapters == 3 else RunFolder(make_run(tmp_path, steps=12))
    name = "alpha" if adapters == 3 else ADAPTER
    keep(folder, [step_rollouts(20, adapter=name, dropped=["scorer: no connection"])])
    if state == "failed":
        error = "trainer.micro_batch_tokens: out of memory"
        write_event(folder, EndEvent(at="2026-01-01T00:00:00Z", code=1, process="trainer", how="ended", error=error))
    elif state == "finished":
        write_summary(folder, wall_s=80.0, adapters={}, report_path=folder.report)
    with live_page(folder) if state == "running" else nullcontext(write_report(folder).as_uri()) as address:
        visit = Visit(browser, address, width, scheme)
        visit.wait("document.querySelector('ol.rollouts button')")
        visit.page.locator("ol.rollouts button").first.click()
        visit.wait("document.querySelector('#group .sample')")
        visit.page.get_by_label("tokens by").select_option("entropy")
        visit.scroll_through()
        assert visit.faults() == []
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        assert visit.problems == []


def test_what_models_write_is_text(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path, steps=3)
    attack = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
    texts = [attack, "</pre></main></body>" + attack, "\u202eright to left\u202c", "\x00\x1b[31mred\x07", "x" * 10**6]
    hostile = step_rollouts(2, n=5, texts=texts * 2, dropped=[attack])
    call = {"id": attack, "type": "function", "function": {"name": attack, "arguments": {attack: attack}}}
    messages = [
        attack,
        None,
        {"role": attack, "tool_calls": [call, attack, None]},
        {"role": "tool", "content": [attack]},
    ]
    written = json.dumps(messages)
    group = msgspec.structs.replace(
        hostile.texts[1], prompt=attack, gold=attack, messages=written, turns=(written,) * 5
    )
    (RunFolder(tmp_path).rollouts / "vocabulary.parquet").unlink()
    keep(RunFolder(tmp_path), [replace(hostile, texts=(hostile.texts[0], group))], vocabulary=[attack] * 1000)
    set_status(RunFolder(tmp_path), "trainer", 0, attack)
    report = write_report(tmp_path)
    visit = Visit(browser, report.as_uri())
    visit.scroll_through()
    visit.page.locator("ol.rollouts button").last.click()
    visit.page.get_by_role("button", name="toy, step 2, group 1, sample 0", exact=True).click()
    visit.wait("document.querySelectorAll('#group .sample').length === 5")
    assert visit.page.evaluate("window.attacked") is None
    shown = visit.page.inner_text("#group")
    assert attack in shown
    boxes = visit.page.locator("#group details")
    assert [text.count(attack) for text in boxes.all_text_contents()] == [6] * 6, "of the prompt, of each answer"
    assert shown.count(attack) > 5 * 6, "tokens are texts of a vocabulary, of models like any other"
    assert visit.requests == [report.as_uri()]
    assert visit.problems == []


def test_rollouts_are_filtered_opened_coloured_and_compared(browser: Browser, tmp_path: Path) -> None:
    """On a phone, by keyboard where a list or a button is meant; a file has its own rows inside."""
    folder = RunFolder(make_run(tmp_path, steps=36))  # kept: steps 0, 5, ..., 35
    visit = Visit(browser, write_report(folder).as_uri(), width=400, scheme="dark")
    page, found = (
        visit.page,
        lambda: [row.split(", ")[1] for row in page.locator("ol.rollouts button").all_inner_texts()],
    )
    visit.wait("document.querySelectorAll('ol.rollouts li').length === 8")
    assert set(found()) == {"step 0", "step 35"}
    page.locator("#filter [name=outcome]").select_option("solved")
    visit.wait("document.querySelectorAll('ol.rollouts li').length === 4")
    page.locator("#filter [name=text]").fill("step 35")
    visit.wait("document.querySelectorAll('ol.rollouts li').length === 2")
    page.locator("#filter [name=highest]").fill("0.5")
    visit.wait("document.querySelectorAll('ol.rollouts li').length === 0")
    for name in ("text", "highest"):
        page.locator(f"#filter [name={name}]").fill("")
    page.locator("#filter [name=outcome]").select_option("")
    step = page.locator("#filter [name=step]")
    step.focus()
    page.keyboard.press("End")
    visit.wait("document.querySelectorAll('ol.rollouts li').length === 4")
    assert step.get_attribute("aria-valuetext") == "step 35"
    page.locator("ol.rollouts button").first.focus()
    page.keyboard.press("Enter")
    visit.wait("document.activeElement.id === 'group'")
    assert page.locator("#group .sample").count() == 4
    assert page.locator("#group .sample .token").count() == 2 * 4, "a run of each version"
    page.get_by_label("tokens by").select_option("mismatch")
    assert page.locator("#group .sample .l2").count() == 4, "0.25 is between 0.1 and 0.5"
    page.get_by_label("tokens by").select_option("entropy")
    assert page.locator("#group .sample .l3").count() == 4, "1.5 is between 1 and 2"
    page.get_by_label("tokens by").select_option("advantage")
    assert page.locator("#group .sample .minus.l2").count() == 2
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert visit.problems == []


def test_dropped_groups_have_their_reason_and_calls_of_tools_are_shown_as_calls(
    browser: Browser, tmp_path: Path
) -> None:
    folder = RunFolder(make_run(tmp_path, steps=1))
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "why"}'}}
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Because."},
    ]
    given = step_rollouts(9, adapter=ADAPTER, dropped=["scorer: no connection"])
    [lost] = given.dropped
    unscored = replace(lost.group.trajectories[0], outcome=Outcome.ERROR)
    group = replace(lost.group, trajectories=(unscored, *lost.group.trajectories[1:]))
    text = msgspec.structs.replace(lost.text, messages=json.dumps(messages))
    keep(folder, [replace(given, dropped=(msgspec.structs.replace(lost, group=group, text=text),))])
    with live_page(folder) as address:
        visit = Visit(browser, address)
        visit.page.locator("#filter [name=outcome]").select_option("dropped")
        visit.wait("document.querySelectorAll('ol.rollouts li').length === 4")
        rows = visit.page.locator("ol.rollouts li").all_inner_texts()
        assert all("because scorer: no connection" in row and "advantage" not in row for row in rows)
        assert ["not scored" in row for row in rows] == [False, False, False, True]
        visit.page.locator("ol.rollouts button").first.click()
        visit.page.get_by_text("messages", exact=True).click()
        shown = visit.page.inner_text("#group details")
        assert 'search({"query": "why"})' in shown
        assert shown.index("result of search") < shown.index("Because.")
        visit.page.locator("#filter [name=outcome]").select_option("trained")
        visit.wait("document.querySelectorAll('ol.rollouts li').length === 16")
        assert visit.problems == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_answers_of_two_versions_are_side_by_side(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    folder = RunFolder(make_run(tmp_path, steps=2))
    attack = "<img src=x onerror='window.attacked = 1'></pre></main>\u202eright to left\u202c\x00\x1b[31mred"
    with live_page(folder) as address:
        visit = Visit(browser, address, width, scheme)
        for prompt in (attack, "2 + 2?"):
            answers = {"toy@v1": attack, "toy@v2": "4\n" + "x" * 10**6}
            save_answers(folder, VersionAnswers(at="2026-01-01T00:00:00Z", prompt=prompt, gold="4", answers=answers))
        visit.wait("document.querySelectorAll('#answers .beside > div').length === 4")
        columns = visit.page.locator("#answers .beside > div")
        left, right = (columns.nth(i).bounding_box() for i in (0, 1))
        beside = left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
        below = left["x"] == right["x"] and left["y"] + left["height"] <= right["y"]
        assert (beside, below) == (width == 1280, width == 400)
        assert columns.nth(0).inner_text().startswith("toy@v1\n")
        assert "<img src=x onerror='window.attacked = 1'></pre></main>" in columns.nth(2).inner_text()
        assert visit.page.locator("#answers .prompt").first.inner_text() == "2 + 2?", "the newest first"
        assert visit.page.evaluate("window.attacked") is None
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        visit.scroll_through()
        assert visit.faults() == []
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
    with live_page(folder) as address:
        visit = Visit(browser, address)
        visit.wait("[...drawn.values()][0].plot")
        visit.page.click("summary")
        began = time.monotonic()
        with MetricsWriter(folder) as writer:
            writer.write(step_record(step=4, version=4, time_s=9.0, adapter=ADAPTER, reward_mean=0.123))
        visit.wait("[...drawn.values()][0].plot.data[1].includes(0.123)")
        visit.wait("document.body.innerText.includes('5/40')")
        values = visit.page.locator(".u-legend").first.locator(".u-value").all_inner_texts()
        assert values[:2] == ["4", "0.123"], "the last step's, without a cursor"
        print(f"shown {time.monotonic() - began:.2f} s after the step")
        assert visit.page.evaluate("document.querySelector('details').open")
        keep(folder, [step_rollouts(7, adapter=ADAPTER), step_rollouts(14, adapter=ADAPTER)])
        visit.wait("document.getElementById('rollouts').innerText.includes('24 rollouts kept')")
        visit.page.locator("ol.rollouts button").first.click()
        visit.page.get_by_label("same prompt beside").select_option("step 7, group 1, toy")
        visit.wait("document.querySelectorAll('#group .beside .sample').length === 8")
        with visit.page.expect_download() as download:
            visit.page.get_by_role("link", name="download as Parquet").click()
        assert len(pq.read_table(download.value.path())) == 24
        assert visit.page.inner_text("#state") == "live"
        paths = {url.removeprefix(address).partition("?")[0] for url in visit.requests}
        assert paths == {"", "data", "rollouts", "group"}
        assert visit.problems == []
    visit.wait("document.getElementById('state').textContent.startsWith('not live')")

"""A planted trouble is on the page and the console within five steps, while the run works and after its end."""

from __future__ import annotations

import io
import random
import re
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.records import Record
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import write_report
from areal_lora.run_folder.events import EndEvent, write_event
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_config
from tests.support.obs.troubles import RECORDS, STEPS, run_of


def shown(folder: RunFolder) -> list[str]:
    html = write_report(folder).read_text(encoding="utf-8")
    return [unescape(text) for text in re.findall(r'<p class="problem" role="status">(.*?)</p>', html)]


def written(path: Path, records: list[Record]) -> tuple[RunFolder, str]:
    """A run folder with these records, and what the console prints of them."""
    folder, out = RunFolder(path), io.StringIO()
    folder.config.write_text(make_config().model_dump_json())
    console = LiveConsole(folder, {"toy": 40}, console=Console(file=out, force_terminal=False, width=1000))
    console.start()
    with MetricsWriter(folder) as writer:
        for record in records:
            writer.write(record)
    console.tick()
    return folder, out.getvalue()


@pytest.mark.parametrize("name", [*STEPS, *RECORDS])
def test_a_trouble_is_on_page_and_console(tmp_path: Path, name: str) -> None:
    trouble, words = STEPS.get(name) or (None, RECORDS[name][1])
    records: list[Record] = [*run_of(random.Random(7), trouble)]
    folder, printed = written(tmp_path, records + ([] if trouble else [RECORDS[name][0]]))
    assert words in printed
    assert [text for text in shown(folder) if words in text]
    write_event(folder, EndEvent(at="2026-01-01T00:00:00Z", process="trainer-0", code=70, how="exited with code 70"))
    assert [text for text in shown(folder) if words in text]


def test_a_healthy_run_has_none(tmp_path: Path) -> None:
    folder, printed = written(tmp_path, [*run_of(random.Random(7))])
    assert shown(folder) == []
    assert not [words for _, words in (*STEPS.values(), *RECORDS.values()) if words in printed]

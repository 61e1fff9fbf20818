"""An adapter that a client drives in view, console, status and summary: its steps, and no end of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from areal_lora.cli.status import look, render
from areal_lora.config.recorded import ENDLESS, adapter_runs, ends_of, more_steps, read_config
from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.summary import read_summary, write_summary
from areal_lora.obs.run_view import RunView
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.clocks import Clock
from tests.support.obs.with_client import CLIENT, client_config, client_records, make_with_client, repeated


def view_of(*beside: str) -> RunView:
    view = RunView(ends_of(client_config(*beside)))
    for record in client_records(bool(beside)):
        view.add(record)
    return view


def test_no_one_knows_its_end() -> None:
    config = client_config("alpha")
    assert ends_of(config) == {"alpha": 8, CLIENT: None}
    runs = adapter_runs(config)
    assert (runs[CLIENT].endless, runs[CLIENT].steps, runs[CLIENT].checkpoint_every) == (True, ENDLESS, 1)
    assert not runs["alpha"].endless
    assert more_steps(config, {"alpha": 8, CLIENT: 3}) == ["run.steps=16"]


def test_its_steps_count_and_the_run_has_the_end_of_the_others() -> None:
    view = view_of("alpha")
    mine = view.adapters[CLIENT]
    assert (mine.steps_done, mine.total, mine.steps_left, mine.state) == (3, None, 0, AdapterPhase.ACTIVE)
    assert (view.steps_done, view.total) == (4 + 3, 8 + 3)
    assert view.remaining_s() is not None
    alone = view_of()
    assert (alone.steps_done, alone.total, alone.remaining_s()) == (3, None, None)
    assert view.shares() == {"alpha": 800 / 1200, CLIENT: 400 / 1200}


def test_a_step_that_was_not_taken_does_not_count() -> None:
    view = RunView({CLIENT: None})
    for record in list(client_records(beside=False))[:4]:
        view.add(record)
    assert view.adapters[CLIENT].steps_done == 2


def test_a_resume_voids_what_was_made_from_its_version_on(tmp_path: Path) -> None:
    """A version is the number of an operation: it says nothing about the number of steps."""
    view = view_of("alpha")
    resume, again = repeated()
    view.add(resume)
    assert view.adapters[CLIENT].steps_done == 2
    assert [record.version for record in view.adapters[CLIENT].steps] == [0, 4, 6]
    assert view.adapters["alpha"].steps_done == 4
    view.add(again)
    assert view.adapters[CLIENT].steps_done == 3
    read = read_metrics(make_with_client(tmp_path, "alpha")).steps
    mine = [(record.version, record.time_s) for record in read if record.adapter == CLIENT]
    assert mine == [(0, 1.0), (4, 3.0), (6, 5.0), (9, 10.0)]
    assert sum(record.adapter == "alpha" for record in read) == 4


def shown(folder: RunFolder, *beside: str, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None)
    live = LiveConsole(folder, ends_of(client_config(*beside)), console=console, clock=Clock())
    live.start()
    with MetricsWriter(folder) as writer:
        for record in client_records(bool(beside)):
            writer.write(record)
            live.tick()
    live.stop()
    return out.getvalue()


@pytest.mark.parametrize("beside", [(), ("alpha",)])
def test_the_console_has_a_line_for_each_step_with_what_is_known(tmp_path: Path, beside: tuple[str, ...]) -> None:
    text = shown(RunFolder(tmp_path), *beside, terminal=False)
    assert str(ENDLESS) not in text
    mine = [line for line in text.splitlines() if "tokens" in line]
    prefix, share = (f"{CLIENT}: ", "  share 40%") if beside else ("", "")
    assert mine[-1] == (
        f"[0:00] {prefix}step 3  loss 0.167  grad 1.250  lr 0.004  120 tokens{share}  train 0.50 of 2.00 s"
    )
    assert "step 3 skipped: its gradient is not finite  loss 0.167  grad -  " in mine[-2]
    assert "reward" not in mine[0]


@pytest.mark.parametrize("beside", [(), ("alpha",)])
def test_the_panel_shows_steps_without_an_end(tmp_path: Path, beside: tuple[str, ...]) -> None:
    last = shown(RunFolder(tmp_path), *beside, terminal=True).rpartition("╭")[2]
    assert str(ENDLESS) not in last
    rows = [line.strip("│ ") for line in last.splitlines()]
    [row] = [row for row in rows if "loss 0.167" in row]
    assert row.startswith(f"{CLIENT}: step 3  loss" if beside else "step 3  loss")


def test_the_status_of_a_run_has_steps_without_an_end(tmp_path: Path) -> None:
    folder = RunFolder(make_with_client(tmp_path / "fake", "alpha"))
    seen = look(folder, read_config(folder))
    assert (seen.steps_done, seen.steps) == (7, 11)
    found = {one.name: (one.steps_done, one.steps) for one in seen.adapters}
    assert found == {"alpha": (4, 8), CLIENT: (3, None)}
    text = render(seen)
    assert "step        7/11   " in text
    assert [row.split()[:3] for row in text.splitlines() if row.startswith(CLIENT)] == [[CLIENT, "active", "3"]]


def test_the_summary_has_its_steps_and_none_that_are_wanted(tmp_path: Path) -> None:
    folder = RunFolder(make_with_client(tmp_path, "alpha"))
    write_summary(folder, wall_s=1.0, adapters={}, report_path="report.html")
    summary = read_summary(folder)
    mine = summary.adapters[CLIENT]
    assert (mine.steps, mine.steps_wanted, mine.trained_tokens, mine.share) == (3, None, 400, round(400 / 1200, 4))
    assert str(ENDLESS) not in folder.summary.read_text()

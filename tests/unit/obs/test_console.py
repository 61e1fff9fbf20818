"""The live view: plain lines off a terminal, a panel on one, only new bytes at each tick."""

import io
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from areal_lora.obs.console import WIDTH, LiveConsole, RunOutput, duration, members_line, number
from areal_lora.obs.metrics.records import (
    CheckpointRecord,
    EvalRecord,
    MembersRecord,
    PublishRecord,
    ResumeRecord,
    SampleRecord,
    StepRecord,
)
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.run_view import KEPT, PROBLEMS_SHOWN, RunView, publish_problem
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import set_status
from tests.support.clocks import Clock
from tests.support.obs.fake_run import make_run
from tests.support.obs.records import step_record


def step(index: int, **values: Any) -> StepRecord:
    return step_record(
        step=index, version=index, time_s=2.0 * (index + 1), staleness={0: 3, 1: 1}, step_s=2.0, **values
    )


def plain(folder: Path, total: int = 10) -> tuple[LiveConsole, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=False, width=40)
    view = LiveConsole(RunFolder(folder), {"toy": total}, console=console, clock=clock)
    view.start()
    return view, out, clock


def test_statuses_are_shown_once_each_until_the_first_step(tmp_path: Path) -> None:
    view, out, clock = plain(tmp_path)
    set_status(RunFolder(tmp_path), "server", 0, "loading [weights]")
    view.tick()
    view.tick()
    clock.now = 61.0
    set_status(RunFolder(tmp_path), "server", 0, "ready")
    view.tick()
    assert out.getvalue().splitlines() == ["[0:00] server-0: loading [weights]", "[1:01] server-0: ready"]


def test_one_line_per_step_eval_and_publish_problem(tmp_path: Path) -> None:
    view, out, _ = plain(tmp_path)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(EvalRecord(version=0, step=0, accuracy=0.25, n=200))
        writer.write(PublishRecord(version=0, total_ms=20.0, probe_mean_abs=0.0))
        writer.write(step(0, reward_mean=0.5, loss=0.01, rollout_tokens_per_s=4321.0))
        view.tick()
        writer.write(step(1, reward_mean=0.75, loss=0.01, kl=0.002))
        writer.write(PublishRecord(version=1, total_ms=20.0, probe_mean_abs=1e-6, differs_from_base=False))
    view.stop()  # what came after the last tick is not lost
    lines = out.getvalue().splitlines()
    assert [line.split("] ", 1)[1].split("  ")[0] for line in lines] == [
        "eval of v0: accuracy 0.250 over 200 problems",
        "step 1/10",
        "step 2/10",
        "publish v1: the servers still score like the base model",
    ]
    assert lines[1] == "[0:00] step 1/10  reward 0.500  loss 0.010  lag 0.25  2 s  4300/2 tok/s  ETA -"
    assert lines[2].endswith("loss 0.010 kl 0.002  lag 0.25  2 s  -/2 tok/s  ETA 0:16")  # 8 steps left at 2 s


def test_flat_rewards_are_named_once_in_place_of_their_consequence(tmp_path: Path) -> None:
    """Without a gradient the servers score like the base at every publish: that is no fault of the servers."""
    view, out, _ = plain(tmp_path)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for i in range(9):
            moved = 0.1 if i == 5 else 0.0
            writer.write(step(i, reward_mean=0.0, groups_equal=0.9, grad_norm=moved))  # of all answered groups
            writer.write(PublishRecord(version=i + 1, total_ms=1.0, probe_mean_abs=0.0, differs_from_base=i >= 5))
    view.stop()
    [found] = [line.split("] ", 1)[1] for line in out.getvalue().splitlines() if "step " not in line[:14]]
    assert found.startswith("no gradient: the rewards of each group are equal: raise sampling.n_samples")


def test_failures_of_rollouts_are_printed_when_they_have_doubled(tmp_path: Path) -> None:
    view, out, _ = plain(tmp_path)
    error = "error: TypeError: x (reward.py:9)"
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for i in range(8):
            writer.write(
                step(i, retried={"scorer": 2 * i}, dropped={"scorer": i}, faults={"scorer": error} if i else {})
            )
    view.stop()
    found = [line.split("] ", 1)[1] for line in out.getvalue().splitlines() if "failed" in line]
    assert found == [f"rollouts failed: scorer: {2 * i} retried, {i} dropped, last: {error}" for i in (1, 2, 4)]


def test_a_resumed_run_does_not_print_its_past(tmp_path: Path) -> None:
    make_run(tmp_path, steps=5)
    view, out, _ = plain(tmp_path)
    view.tick()
    assert out.getvalue() == ""
    assert view.view.steps_done == 5


def test_statuses_return_when_nothing_is_recorded_for_long(tmp_path: Path) -> None:
    make_run(tmp_path, steps=2)
    view, out, clock = plain(tmp_path)
    set_status(RunFolder(tmp_path), "trainer", 0, "waiting for rollouts")
    view.tick()
    assert out.getvalue() == ""
    clock.now = 60.0
    set_status(RunFolder(tmp_path), "trainer", 0, "still waiting for rollouts")
    view.tick()
    assert out.getvalue() == "[1:00] trainer-0: still waiting for rollouts\n"


@pytest.mark.parametrize("width", [60, 120])
def test_the_panel_shows_the_run(tmp_path: Path, width: int) -> None:
    make_run(tmp_path, steps=20)
    out = io.StringIO()
    view = LiveConsole(
        RunFolder(tmp_path), {"toy": 40}, console=Console(file=out, force_terminal=True, width=width, color_system=None)
    )
    view.start()
    view.tick()
    view.stop()
    text = out.getvalue()
    for part in ("20/40", "ETA 0:40", "reward", "0.850", "v20", "lag"):
        assert part in text, part


def test_the_panel_shows_what_processes_wait_for_before_the_first_step(tmp_path: Path) -> None:
    set_status(RunFolder(tmp_path), "server", 0, "loading [weights]")
    out = io.StringIO()
    view = LiveConsole(
        RunFolder(tmp_path), {"toy": 40}, console=Console(file=out, force_terminal=True, width=100, color_system=None)
    )
    view.start()
    view.stop()
    view.stop()
    assert "server-0" in out.getvalue()
    assert "loading [weights]" in out.getvalue()


def test_a_long_resumed_run_is_remembered_in_part_and_counted_in_full(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for k in range(2 * KEPT):
            writer.write(step(k, reward_mean=0.5))
            writer.write(PublishRecord(version=k + 1, total_ms=20.0, probe_mean_abs=1e-6))
    view, _, _ = plain(tmp_path, total=3 * KEPT)
    assert view.view.steps_done == 2 * KEPT
    assert (len(view.view.steps), len(view.view.publishes)) == (KEPT, KEPT)
    assert len(view.view.problems) == PROBLEMS_SHOWN
    assert view.view.remaining_s() == 2.0 * KEPT
    view.view.add(ResumeRecord(version=7, time_s=1.0))  # an older checkpoint than all that is remembered
    assert view.view.steps_done == 7


def test_records_that_cannot_be_read_are_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    view, out, _ = plain(tmp_path)
    path = RunFolder(tmp_path).metrics
    path.mkdir()  # reading it is an error, for any user
    for _ in range(3):
        view.tick()
    assert out.getvalue() == f"[0:00] records cannot be shown: {path}: Is a directory; the run continues\n"
    path.rmdir()
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(step(0, reward_mean=0.5))
    view.tick()
    assert "step 1/10" in out.getvalue()
    path.rename(tmp_path / "away")
    path.mkdir()
    view.tick()
    view.stop()
    assert out.getvalue().count("cannot be shown") == 2, "it is said again when it happens again"


def test_a_line_that_is_no_record_is_named_and_those_around_it_are_shown(tmp_path: Path) -> None:
    view, out, _ = plain(tmp_path)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(step(0, reward_mean=0.5))
    with RunFolder(tmp_path).metrics.open("a") as file:
        file.write('{"kind": "step", "step": "broken"}\n')
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(step(1, reward_mean=0.5))
    for _ in range(4):
        view.tick()
    shown = out.getvalue().splitlines()
    assert ["step 1/10" in shown[0], f"{RunFolder(tmp_path).metrics}:2" in shown[1], "step 2/10" in shown[2]] == [
        True
    ] * 3
    assert len(shown) == 3


def test_a_publish_without_a_finite_probe_is_a_problem() -> None:
    assert publish_problem(PublishRecord(version=1, total_ms=1.0, differs_from_base=True)) is not None
    fine = PublishRecord(version=1, total_ms=1.0, differs_from_base=True, probe_mean_abs=1e-6)
    assert publish_problem(fine) is None


def test_small_formats() -> None:
    assert (duration(75), duration(3725.4), duration(0)) == ("1:15", "1:02:05", "0:00")
    assert (number(None), number(0.0), number(0.5), number(2e-6)) == ("-", "0.000", "0.500", "2e-06")


def test_servers_that_come_and_go_are_one_line() -> None:
    record = MembersRecord(version=4, servers=3, joined=["server-5", "server-6"], left=["server-1"])
    assert members_line(record) == "server-5, server-6 joined; server-1 left: 3 servers serve v4"
    caught_up = MembersRecord(version=4, servers=2, joined=["server-1"], publish_ms=120.4)
    assert members_line(caught_up) == "server-1 joined: 2 servers serve v4, sent in 120 ms"
    assert members_line(MembersRecord(version=4, servers=2, lost={"server-1": "died"})) is None


WIDE = (None, 0.0, -1e-5, 1e30, -123456.789, 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_one_line_of_100_columns_for_wide_values_and_several_adapters(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"{'an-adapter-' * rng.randrange(5)}{i}" for i in range(rng.choice((1, 3)))]
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=40)
    view = LiveConsole(RunFolder(tmp_path), dict.fromkeys(names, 1_000_000), console=console, clock=clock)
    view.start()
    clock.now = 10.0 ** rng.randrange(6)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for _ in range(20):
            tags = ("reward_mean", "loss", "kl", "rollout_tokens_per_s")
            values = {tag: rng.choice(WIDE) for tag in tags} | {"step_s": 10.0 ** rng.randrange(-3, 6)}
            at, lags = rng.randrange(1_000_000), {0: 1, rng.randrange(1000): 10 ** rng.randrange(12)}
            record = step_record(step=at, version=at, time_s=1e6 * rng.random(), staleness=lags, **values)
            writer.write(msgspec.structs.replace(record, adapter=names[-1]))
    view.stop()
    lines = [line for line in out.getvalue().splitlines() if "step " in line]
    assert len(lines) == 20
    assert max(map(len, lines)) <= WIDTH == 100
    for line in lines:
        assert all(word in line for word in ("  reward ", "  loss ")), line


def test_the_usual_values_of_several_adapters_fit(tmp_path: Path) -> None:
    out, clock = io.StringIO(), Clock()
    totals = {"gsm8k": 2000, "math": 2000}
    view = LiveConsole(RunFolder(tmp_path), totals, console=Console(file=out), clock=clock)
    view.start()
    clock.now = 3725.0
    values = {"reward_mean": 0.312, "loss": -0.0123, "kl": 0.0012, "rollout_tokens_per_s": 43210.0, "step_s": 12.3}
    record = step_record(step=119, version=119, time_s=1.0, adapter="gsm8k", staleness={0: 260, 1: 500_000}, **values)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(record)
    view.stop()
    line = "gsm8k: step 120/2000  reward 0.312  loss -0.012 kl 0.001  lag 1.00  12.3 s  43k/41k tok/s"
    assert out.getvalue() == f"[1:02:05] {line}\n"


def test_an_evaluation_shows_one_of_its_answers_in_one_line_without_control_characters(tmp_path: Path) -> None:
    view, out, _ = plain(tmp_path)
    answer = f"\x1b[31mred\r\n[bold]{'x' * 200} is 7"
    samples = [
        SampleRecord(prompt=f"question {i} " * 9, completion=answer, gold="7", reward=reward)
        for i, reward in enumerate((1.0, None))
    ]
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(EvalRecord(version=20, step=20, accuracy=0.25, n=2, samples=samples))
        writer.write(EvalRecord(version=21, step=21, accuracy=0.25, n=2, samples=samples))
    view.stop()
    _, first, _, second = out.getvalue().splitlines()
    assert first.startswith("  answer of v20, reward 1.000: question 0")
    assert second.startswith("  answer of v21, reward -: question 1")
    assert " -> [31mred [bold]x..." in first
    assert first.endswith("xxx is 7")
    assert len(first) == WIDTH


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    view = LiveConsole(RunFolder(tmp_path), {"toy": 9}, console=Console(file=out, force_terminal=True, highlight=False))
    view.start()
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(CheckpointRecord(version=1, write_s=0.0, failed=True))
    view.stop()
    assert "checkpoint v1 was not written" in out.getvalue()
    assert ("\x1b[1;31m" in out.getvalue()) is not no_color


def test_a_resume_leaves_no_figures_of_what_it_supersedes() -> None:
    view = RunView({"toy": 10})
    view.add(EvalRecord(version=0, step=0, accuracy=0.25, n=200))
    for k in range(4):
        view.add(step(k))
        view.add(PublishRecord(version=k + 1, total_ms=500.0, probe_mean_abs=None))
    view.add(EvalRecord(version=4, step=4, accuracy=0.75, n=200))
    view.add(ResumeRecord(version=2, time_s=9.0))
    assert view.only is not None
    assert view.only.last_eval is not None
    assert view.only.last_eval.version == 0
    assert (view.steps_done, list(view.problems), view.remaining_s()) == (2, [], None)


@pytest.mark.parametrize("ends", ["the pipe is closed", "the terminal is closed", "the disk is full"])
def test_an_output_that_ends_does_not_end_the_run(ends: str) -> None:
    reader, writer = os.openpty() if ends == "the terminal is closed" else os.pipe()
    if ends == "the disk is full":
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), writer)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        console = Console(file=RunOutput(stream), width=40)
        os.close(reader)
        for _ in range(2):
            console.print("step 1")
        assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull


def test_what_the_encoding_lacks_is_escaped() -> None:
    """PYTHONIOENCODING=ascii, or a locale of one byte a character: an answer may have any text."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(file=RunOutput(stream), width=40).print("5 \u20ac \udcff")
    assert raw.getvalue() == b"5 \\u20ac \\udcff\n"

"""Several adapters in one view: states, steps, shares, remaining time; what the console says of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from areal_lora.config.recorded import steps_of
from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.records import AdapterStateRecord, ResumeRecord, StepRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.run_view import KEPT, RunView
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.clocks import Clock
from tests.support.obs.fake_run import make_run
from tests.support.obs.records import step_record
from tests.support.obs.three_adapters import REASON, TURNS, make_three, records, step, three_config


def view_of(turns: int = len(TURNS)) -> RunView:
    view = RunView(steps_of(three_config()))
    for record in records(turns):
        view.add(record)
    return view


def test_each_adapter_has_its_own_steps_state_and_evaluations() -> None:
    view = view_of()
    found = {name: (one.steps_done, one.total, one.state, one.reason) for name, one in view.adapters.items()}
    assert found == {
        "alpha": (8, 8, AdapterPhase.DONE, ""),
        "beta": (3, 8, AdapterPhase.FAILED, REASON),
        "gamma": (4, 4, AdapterPhase.DONE, ""),
    }
    assert {name: one.last_eval and one.last_eval.version for name, one in view.adapters.items()} == {
        "alpha": 8,
        "beta": 0,
        "gamma": 4,
    }
    assert view.only is None
    # 8 x 200, 3 x 100 and 4 x 50 tokens.
    assert view.shares() == {"alpha": 1600 / 2100, "beta": 300 / 2100, "gamma": 200 / 2100}


@pytest.mark.parametrize("phase", [AdapterPhase.DELETED, AdapterPhase.PAUSED])
def test_of_a_deleted_adapter_the_last_step_and_evaluation_are_kept(phase: AdapterPhase) -> None:
    view = view_of()
    alpha = view.adapters["alpha"]
    before = alpha.steps_done, alpha.last_eval, alpha.steps[-1], view.shares()
    view.add(AdapterStateRecord(adapter="alpha", state=phase, version=8, time_s=99.0))
    assert (alpha.steps_done, alpha.last_eval, alpha.steps[-1], view.shares()) == before
    assert (len(alpha.steps), len(alpha._evals)) == ((1, 1) if phase is AdapterPhase.DELETED else (8, 3))
    assert alpha.steps.maxlen == KEPT


@pytest.mark.parametrize(
    ("turns", "left"),
    [
        (7, (8 - 3) + (8 - 2) + (4 - 2)),  # all three train
        (8, (8 - 3) + 0 + (4 - 2)),  # beta has failed: its steps do not come
        (11, (8 - 4) + 0 + 0),  # gamma is done
        (15, 0),
    ],
)
def test_the_remaining_time_is_of_the_steps_that_still_come(turns: int, left: int) -> None:
    assert view_of(turns).remaining_s() == pytest.approx(2.0 * left)


def test_a_resume_of_one_adapter_leaves_the_others_and_tries_the_failed_one_again() -> None:
    view = view_of()
    view.add(ResumeRecord(adapter="beta", version=2, time_s=31.0))
    beta, alpha = view.adapters["beta"], view.adapters["alpha"]
    assert (beta.state, beta.reason, beta.steps_done, beta.steps_left) == (AdapterPhase.ACTIVE, "", 2, 6)
    assert (alpha.state, alpha.steps_done) == (AdapterPhase.DONE, 8)
    assert view.steps_done == 8 + 2 + 4
    assert sum(s.adapter == "beta" for s in view.steps) == 2
    view.add(step("beta", 2, 33.0))
    assert beta.steps_done == 3


def test_without_a_recorded_state_the_steps_tell_it() -> None:
    view = RunView({"alpha": 2, "beta": 2, "gamma": 2})
    for record in (step("alpha", 0, 1.0), step("alpha", 1, 2.0), step("beta", 0, 3.0)):
        view.add(record)
    assert [str(one.state) for one in view.adapters.values()] == ["done", "active", "pending"]


def joined(key: str, steps: int | None, state: AdapterPhase = AdapterPhase.PENDING) -> AdapterStateRecord:
    return AdapterStateRecord(adapter=key, state=state, version=0, steps=steps)


def test_an_adapter_that_joined_says_how_many_steps_it_is_to_make() -> None:
    view = RunView({})
    for record in (joined("new.1", 5), joined("sdk.1", None)):
        view.add(record)
    view.add(joined("new.1", None, AdapterPhase.ACTIVE))  # later states do not repeat it
    for k in range(3):
        view.add(StepRecord(adapter="new.1", step=k, version=k, time_s=2.0 * k))
    new, sdk = view.adapters["new.1"], view.adapters["sdk.1"]
    assert (new.steps_done, new.steps_left, sdk.steps_done, sdk.total, sdk.steps_left) == (3, 2, 0, None, 0)
    assert (view.total, view.remaining_s()) == (5, 4.0)
    view.add(ResumeRecord(adapter="new.1", version=2, time_s=9.0))
    assert new.steps_done == 2


def test_the_lines_of_adapters_that_joined_have_their_steps(tmp_path: Path) -> None:
    out, folder = io.StringIO(), RunFolder(tmp_path)
    console = LiveConsole(folder, {}, console=Console(file=out, width=40), clock=Clock())
    console.start()
    with MetricsWriter(folder) as writer:
        for key, steps in (("new.1", 5), ("old.1", None)):
            writer.write(joined(key, steps))
            writer.write(StepRecord(adapter=key, step=0, version=0, time_s=1.0))
    console.stop()
    assert "new.1: step 1/5  reward" in out.getvalue()
    assert "old.1: step 1  reward" in out.getvalue(), "a file of an earlier version"
    terminal = Console(file=(drawn := io.StringIO()), force_terminal=True, width=120, color_system=None)
    panel_of = LiveConsole(folder, {}, console=terminal)
    panel_of.start()
    panel_of.stop()
    assert "1/5" in drawn.getvalue()
    assert "1/0" not in drawn.getvalue()


def test_plain_lines_name_the_adapter_and_its_own_steps(tmp_path: Path) -> None:
    out, folder = io.StringIO(), RunFolder(tmp_path)
    console = LiveConsole(folder, steps_of(three_config()), console=Console(file=out, width=40), clock=Clock())
    console.start()
    with MetricsWriter(folder) as writer:
        for record in records(8):
            writer.write(record)
            console.tick()
        writer.write(ResumeRecord(adapter="beta", version=2, time_s=17.0))
    console.stop()
    lines = [line.removeprefix("[0:00] ") for line in out.getvalue().splitlines()]
    assert lines[:3] == [
        "alpha: pending at v0",
        "alpha: eval of v0: accuracy 0.250, mean reward 0.250 over 20 problems, 1 unscored",
        "alpha: active at v0",
    ]
    assert lines[-3:] == [
        "beta: step 3/8  reward 0.375  loss 0.010  lag 0.50  2 s  4000/50 tok/s  ETA 0:24",
        f"beta: failed at v3: {REASON}",
        "beta: resumed from checkpoint v2",
    ]
    assert "gamma: step 2/4" in out.getvalue()


def panel(folder: RunFolder, steps: dict[str, int], width: int) -> list[str]:
    """The rows inside the border of the last panel that a terminal shows."""
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=width, color_system=None)
    console = LiveConsole(folder, steps, console=terminal)
    console.start()
    console.stop()
    last = out.getvalue().rpartition("╭")[2].splitlines()[1:-1]
    return [line.strip("│ ") for line in last if line.startswith("│")]


def test_the_panel_has_the_newest_lines_of_each_adapter(tmp_path: Path) -> None:
    rows = panel(make_three(tmp_path), steps_of(three_config()), 200)
    for start in ("alpha: step 8/8", "alpha: eval of v8: accuracy 0.500", "beta: step 3/8", "gamma: step 4/4"):
        assert sum(row.startswith(start) for row in rows) == 1, start
    assert f"beta: failed at v3: {REASON}" in rows
    assert any(row.startswith("steps") and " 15/20 " in row for row in rows)


def test_one_adapter_has_no_table_and_no_name(tmp_path: Path) -> None:
    make_run(tmp_path, steps=12)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(AdapterStateRecord(adapter="toy", state=AdapterPhase.ACTIVE, version=12))
    shown = panel(RunFolder(tmp_path), {"toy": 40}, 120)
    assert not [row for row in shown if "toy" in row or "adapter" in row]
    out = io.StringIO()
    console = LiveConsole(RunFolder(tmp_path), {"toy": 40}, console=Console(file=out))
    console.start()
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(AdapterStateRecord(adapter="toy", state=AdapterPhase.DRAINING, version=12))
        writer.write(
            AdapterStateRecord(adapter="toy", state=AdapterPhase.FAILED, version=12, reason="the disk is full")
        )
    console.tick()
    assert out.getvalue() == "[0:00] failed at v12: the disk is full\n"


def test_another_behaviour_correction_is_one_line_with_the_mismatch_that_chose_it() -> None:
    view = RunView({"toy": 10})
    for i, (correction, mean) in enumerate([(1, 0.02), (1, 0.13), (2, 0.07), (2, 0.004), (0, 0.004)]):
        found = view.add(
            step_record(step=i, version=i, time_s=i + 1.0, correction=float(correction), behaviour_mean_abs=mean)
        )
        assert found == {
            2: ["behaviour correction truncate -> mask: mean |log w| was 0.13"],
            4: ["behaviour correction mask -> none: mean |log w| was 0.004"],
        }.get(i, [])
    assert view.add(step_record(step=5, version=5, time_s=6.0)) == [], "no longer chosen by step"

"""The last lines of a run with several adapters, and its summary."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from rich.console import Console

from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.obs.report.closing import closing_lines, detail_lines, print_report
from areal_lora.obs.report.summary import Figures, read_summary, write_summary
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.obs.three_adapters import REASON, TURNS, make_three


def ended(path: Path, turns: int = len(TURNS)) -> RunFolder:
    folder = make_three(path, turns)
    exported = {name: folder.adapter_export(name) for name in ("alpha", "gamma")}
    write_summary(folder, wall_s=31.0, adapters=exported, report_path=folder.report)
    return folder


def test_the_best_evaluation_is_of_the_newest_measure() -> None:
    figures, best = Figures(), list[int]()
    for version, accuracy, measure in [(20, 0.9, "easy"), (40, 0.3, "hard"), (60, 0.55, "hard"), (80, 0.35, "hard")]:
        figures.add(EvalRecord(version=version, step=version, accuracy=accuracy, n=1, measure=measure))
        assert figures.best_eval is not None
        best.append(figures.best_eval.version)
    assert best == [20, 40, 60, 60]


def test_the_summary_has_the_figures_of_each_adapter_and_sums(tmp_path: Path) -> None:
    folder = ended(tmp_path)
    values = json.loads(folder.summary.read_text())
    assert (values["steps"], values["eval_problems"], values["eval_unscored"]) == (15, 60, 3)
    assert (values["eval_before"], values["eval_after"], values["adapter_path"]) == (None, None, None)
    assert values["staleness_histogram"] == {"0": 350 + 1750 // 2, "1": 1750 // 2}
    assert values["dropped"] == {"stale": 7 + 2 + 3}
    assert values["adapters"]["beta"] == {
        "state": "failed",
        "reason": REASON,
        "steps": 3,
        "steps_wanted": 8,
        "trained_tokens": 300,
        "share": 0.1429,
        "eval_first": 0.25,
        "eval_last": None,
        "eval_best": 0.25,
        "eval_reward_first": 0.25,
        "eval_reward_last": None,
        "eval_reward_best": 0.25,
        "best_version": 0,
        "max_staleness": 1,
        "max_staleness_allowed": 2,
        "path": None,
    }
    alpha, gamma = (read_summary(folder).adapters[name] for name in ("alpha", "gamma"))
    assert (alpha.eval_first, alpha.eval_last, alpha.eval_best, alpha.best_version) == (0.25, 0.5, 0.75, 4)
    assert (gamma.state, gamma.steps, gamma.steps_wanted, gamma.max_staleness_allowed) == (AdapterPhase.DONE, 4, 4, 1)
    assert gamma.path == str(folder.adapter_export("gamma"))
    assert [read_summary(folder).steps_of(name) for name in ("alpha", "beta", "gamma", "delta")] == [8, 3, 4, 0]


def test_the_end_has_a_line_for_each_adapter(tmp_path: Path) -> None:
    folder = ended(tmp_path / "a run")
    folder.profile.mkdir()
    lines = closing_lines(folder)
    course = "accuracy 0.250 -> 0.500, mean reward 0.250 -> 0.500"
    assert lines[:6] == [
        "result   15 steps of 3 adapters in 0:31, 1 failed",
        f"adapter  alpha: 8 steps, {course}, best 0.750 (v4), 76% of the trained tokens, in {folder}/adapters/alpha",
        "adapter  beta: failed after 3 steps, accuracy 0.250, mean reward 0.250, 14% of the trained tokens, "
        f"not exported: {REASON}",
        f"adapter  gamma: 4 steps, {course}, 10% of the trained tokens, in {folder}/adapters/gamma",
        f"report   {folder}/report.html",
        f"profile  {folder}/profile",
    ]
    chat, resume = (shlex.split(line)[1:] for line in lines[6:])
    assert chat == [sys.executable, "-m", "areal_lora", "chat", str(folder), "--adapter", "alpha"]
    assert resume == [sys.executable, "-m", "areal_lora", "resume", str(folder)], "it tries beta again"


def test_details_have_the_commands_of_each_exported_adapter(tmp_path: Path) -> None:
    folder = ended(tmp_path)
    lines = detail_lines(folder)
    for word in ("serve", "evaluate"):
        found = [shlex.split(line)[-2:] for line in lines if line.startswith(word)]
        assert found == [["--adapter", "alpha"], ["--adapter", "gamma"]]
    assert sum(line.startswith("model = PeftModel") for line in lines) == 2
    assert json.loads(lines[-3].partition(": ")[2]).keys() == {"alpha", "beta", "gamma"}


@pytest.mark.parametrize("turns", [0, 4])
def test_an_early_end_has_lines_too(tmp_path: Path, turns: int) -> None:
    """Nothing measured is left out, not written as zero."""
    result, *adapters = closing_lines(ended(tmp_path, turns))[:4]
    assert result == f"result   {turns} steps of 3 adapters in 0:31"
    assert [line.split()[2:4] for line in adapters] == [["active", "after"]] * 3


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder, out = make_three(tmp_path / "a run", 4), io.StringIO()
    print_report(folder, Console(file=out, width=20))
    assert folder.report.read_text().startswith("<!doctype html>")
    with folder.metrics.open("a") as file:
        file.write('{"kind": "step"}\n')
    print_report(folder, Console(file=out, width=20))
    written, refused = out.getvalue().splitlines()
    assert written == f"report   {folder.report}"
    assert refused.startswith(f"report   not written: {folder.metrics}:")

"""A sweep of two learning rates with a real server: its winner has the numbers of a run of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.launcher.sweep import read_sweep
from tests.support.e2e.several_adapters import STEPS, Ended, entries, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_winner_equals_its_solo_run_and_the_loser_leaves(alone: Ended, tmp_path: Path) -> None:
    """Weights and both moments of every version, bit for bit.

    The rung is after the first step, whose answers both trials sample with version 0: their scores are equal if prompts
    and seeds are, and then the first of the list continues.
    """
    [attention] = entries("attention")
    rate = attention["optimizer"]["lr"]
    swept = run(
        tmp_path,
        "swept",
        [attention],
        "--rungs",
        f"1/{STEPS['attention']}",
        f"adapters.0.optimizer.lr=[{rate},{2 * rate}]",
    )
    assert swept.code == 0, swept.output
    sweep = read_sweep(swept.folder)
    assert sweep is not None
    winner, loser = [trial.key for trial in sweep.trials]
    [decision] = sweep.decisions
    assert (decision.step, decision.stopped) == (1, (loser,))
    assert decision.scores[winner] == decision.scores[loser] is not None
    assert swept.states[winner] == alone.states["attention"]
    assert len(swept.states[loser]) < STEPS["attention"], "it left early"
    assert swept.states[loser][0] == swept.states[winner][0]
    assert swept.states[loser][1] != swept.states[winner][1], "the comparison can fail"
    assert (swept.folder.adapter_export(winner) / "adapter_model.safetensors").exists()
    assert f"set      adapters.0.optimizer.lr={rate}" in swept.output
    assert "has the same curve, bit for bit" in swept.output

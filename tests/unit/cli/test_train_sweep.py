"""`areal-lora sweep`: what it refuses, shows and repeats without a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.cli import app
from areal_lora.config.recorded import write_config
from areal_lora.launcher.sweep import Halving, launched, plan_sweep, write_sweep
from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.summary import write_summary
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.launcher.command import configs
from tests.support.obs.records import step_record
from tests.support.obs.three_adapters import state

FILES = configs("gsm8k_grpo_megatron_lora_moe", "embedded")
RANKS = "adapters.0.rank=[4,8]"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


def make_sweep(root: Path) -> RunFolder:
    config, sweep = plan_sweep(FILES[1::2], [RANKS])
    folder = RunFolder(root / "runs" / "embedded")
    folder.path.mkdir(parents=True)
    write_config(folder, launched(config, sweep))
    write_sweep(folder, sweep)
    Halving(folder, LiveConsole(folder, {}))
    return folder


def test_trials_and_rungs_are_shown_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["sweep", FILES[1], *FILES[2:], RANKS, "--rungs", "1/4,0.5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "2 trials, compared by reward; rungs: step 15 keeps 1" in out
    assert "  rank-4: adapters.0.rank=4" in out
    assert "120 steps of 2 adapters on this machine; nothing is started" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["adapters.0.rank=[4,16]"], "rank 16 is above the servers' rollout.max_lora_rank = 8"),
        (["adapters.0.rank=4"], "give 1 different combinations"),
        ([RANKS, "--rungs", "1/x"], "'1/x' does not rise between 0 and 1"),
        ([RANKS, "--by", "loss"], "'loss' is not one of 'reward', 'evaluation'"),
    ],
)
def test_what_cannot_start_is_refused_by_the_rules_of_a_start(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["sweep", *FILES, *words]) != 0
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_has_ended_is_not_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep(tmp_path)
    with MetricsWriter(folder) as writer:
        for key, phase in (("rank-4.1", AdapterPhase.DELETED), ("rank-8.1", AdapterPhase.DONE)):
            writer.write(step_record(step=0, version=0, time_s=1.0, adapter=key, reward_mean=0.5))
            writer.write(state(key, phase, 1, 2.0))
    write_summary(folder, wall_s=1.0, adapters={}, report_path=folder.report)
    assert app.main(["sweep", *FILES, RANKS]) == 0
    assert "set      adapters.0.rank=" in capsys.readouterr().out
    assert not folder.events.exists()
    assert app.main(["sweep", *FILES, "adapters.0.rank=[2,8]"]) == 64
    assert "a sweep of other trials" in capsys.readouterr().err


def test_adapters_that_have_joined_join_again_at_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their names have a dot, which those of a configuration may not have beside a service."""
    make_sweep(tmp_path)
    assert app.main(["plan", "embedded"]) == 0, capsys.readouterr().err

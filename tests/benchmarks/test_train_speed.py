import json
import sys

import numpy as np
import pytest
from train_case import TINY, make_batch
from train_speed import Measured, claims, compare, main

from areal_lora.data.collate import contradiction
from tests.support.benchmarks import train_side
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES


def measured(ours, peft, tokens=100, flops=1e9):
    cpu_s = {"ours": ours, "peft": peft}
    return Measured(case="c", tokens=tokens, flops=flops, cpu_s=cpu_s, wall_s=cpu_s)


def test_speeds_and_share_of_the_peak():
    result = measured([2.0, 4.0, 1.0], [4.0, 2.0, 3.0])
    assert result.tokens_per_s("ours") == [50.0, 25.0, 100.0]
    assert result.peak_share("ours", 2e9) == pytest.approx(0.25)  # a step of 2 s (median)


def test_the_claim_is_the_smaller_model_ratio_of_paired_rounds():
    # A slow machine in one round slows both sides: the ratio of that round counts like any other.
    slower = measured([1.0, 10.0, 1.0], [2.0, 20.0, 2.0])
    faster = measured([1.0, 1.0, 1.0], [3.0, 3.0, 9.0])
    assert claims([slower, faster]) == {"train_vs_transformers": 2.0}


def test_the_batch_is_the_demos_and_a_valid_one():
    batch = make_batch(TINY, 112, "a")
    assert not contradiction(batch)
    assert batch.n_sequences == 64 * 8
    assert 25_000 < batch.n_tokens < 29_000
    assert set(batch.adapters) == {"a"}


def test_sides_may_differ_in_a_tie_between_experts_and_not_in_general(capsys):
    differences = np.full(5000, 1e-6)
    differences[:4] = 1.0
    compare("c", differences)
    assert "by more than 1e-04 in 4" in capsys.readouterr().out
    differences[4:6] = 1.0
    with pytest.raises(SystemExit, match="different models"):
        compare("c", differences)


def test_a_side_without_a_number_is_no_tie():
    differences = np.full(5000, 1e-6)
    differences[7] = float("nan")
    with pytest.raises(SystemExit, match="different models"):
        compare("c", differences)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_sides_compute_the_same_and_are_measured(tmp_path, monkeypatch):
    forks = starter_of(ROLES["trainer.python"]).interpreter(tmp_path / "forks", train_side.__name__)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {forks} -m "$@"\n')  # the fork knows the script
    python.chmod(0o755)
    out = tmp_path / "out.json"
    arguments = ["--only", "tiny", "--groups", "2", "--rounds", "1", "--force", "--json", str(out)]
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "argv", ["train_speed.py", *arguments])
    main()
    result = json.loads(out.read_text())
    (figures,) = result["results"]
    assert result["claims"]["train_vs_transformers"] > 0
    assert [len(figures["cpu_s"][side]) for side in ("ours", "peft")] == [1, 1]

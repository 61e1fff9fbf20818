"""Staleness is hard (C7) and every group is consumed once (C8), whatever dies: the feed before a judge."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from areal_lora.rollout.controller.pacing import StalenessBudget
from tests.support.rollout.simulation import SAMPLES, Simulation
from tests.support.sizes import sample, size

STEPS = size(230, 1150)  # of at least 14 groups: 50,000 samples, nightly a quarter of a million


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("eta", sample([0, 1, 2, 8], 2, lambda eta: (eta == 0,)))
def test_a_million_samples(eta: int, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    every = 3 if eta == 2 else 1
    simulation = Simulation(eta=eta, steps=STEPS, seed=seed, folder=tmp_path, every=every)
    simulation.run()
    judge, happened = simulation.judge, simulation.happened
    consumed = len(judge.where) * SAMPLES
    print(consumed, "samples,", happened, dict(judge.dropped))
    assert consumed >= size(50_000, 250_000)
    assert judge.most_stale == eta
    for disaster in ("server", "controller", "trainer", "both", "fallback", "late", "ledger of earlier steps"):
        assert happened[disaster] > 0


def test_without_the_freshness_check_stragglers_would_be_trained_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Admission alone does not hold the bound, and the judge sees it broken."""
    monkeypatch.setattr(StalenessBudget, "refusal", lambda self, oldest, newest, version: "")
    with pytest.raises(AssertionError):
        Simulation(eta=1, steps=60, seed=5, folder=tmp_path).run()

"""Sequences without a gradient are computed forward only; the step is the same one, in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.distributed.engine_ranks import Case
from tests.support.distributed.oracle import make_model, random_adapter
from tests.support.distributed.spawn import run_ranks
from tests.support.distributed.zero_ranks import compared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CASES = [
    Case(name="fsdp 2, recompute", world=2, budget=60, engine="fsdp", recompute="full"),
    Case(name="ep 2, selective", world=2, budget=60, ep=2, recompute="selective"),
    Case(name="pp 2, virtual", world=2, budget=60, pp=2, stages=(1, 1, 1, 1)),
    Case(name="tp 2", world=2, budget=60, tp=2),
    Case(name="cp 2", world=2, budget=60, cp=2),
]


@pytest.mark.parametrize("whole", [False, True], ids=["a part", "all of the batch"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_step_is_the_same_with_fewer_backward_passes(case: Case, whole: bool, tmp_path: Path) -> None:
    adapter = {name: value.numpy() for name, value in random_adapter("moe", seed=5).items()}
    ranks = run_ranks(compared, case.world, tmp_path, (make_model(tmp_path, "moe"), case, adapter, whole))
    assert any(grad.any() for found in ranks for grad in found[False]["grads"].values()) != whole
    for found in ranks:
        plain, fewer = found[False], found[True]
        assert plain["passes"][False] == 0
        assert fewer["passes"][False] > 0
        assert fewer["passes"][True] < plain["passes"][True]
        assert (fewer["passes"][True] == 0) == whole
        for name, grad in plain["grads"].items():
            assert np.abs(fewer["grads"][name] - grad).max() <= 1e-5 * max(np.abs(grad).max(), 1e-6), name
        assert fewer["sums"] == pytest.approx(plain["sums"], rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(fewer["scores"], plain["scores"], atol=1e-4)
        on_both = (fewer["alone"] != 0) & (plain["alone"] != 0)  # a rank has the tokens of its part
        assert on_both.any()
        np.testing.assert_allclose(fewer["alone"][on_both], plain["alone"][on_both], atol=1e-4)

"""Clients' passes and steps on both engines and several ranks: the same numbers as the engine's verbs, bit for bit.

Those of several adapters in one pass are the same but for rounding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.distributed.engine_ranks import Case
from tests.support.distributed.operations_ranks import exercise
from tests.support.distributed.spawn import run_ranks
from tests.support.paths import EXAMPLES
from tests.support.sizes import sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = [
    Case(name="megatron, ep 2", world=2, ep=2),
    Case(name="megatron, tp 2, pp 2", world=4, tp=2, pp=2),
    Case(name="fsdp, dp 2", world=2, engine="fsdp"),
]


@pytest.mark.parametrize("case", sample(CASES, 0, lambda case: [case.engine]), ids=lambda case: case.name)
def test_operations_are_the_engines_verbs(case: Case, tmp_path: Path) -> None:
    ranks = run_ranks(exercise, case.world, tmp_path, (str(EXAMPLES / "tiny_model"), case), timeout_s=400.0)
    for found in ranks:
        assert found["ops"] == found["plain"], "a step of each loss, with values of the call and with configured ones"
        assert found["neighbour"][0] == found["neighbour"][1], "the adapter beside them"
        assert found["poisoned"][0] == found["poisoned"][1]
        assert found["after"][0] == found["after"][1], "a forgotten window leaves nothing"
        np.testing.assert_allclose(found["whole"], found["chunks"], rtol=0, atol=1e-6)
        for looked, learned in zip(*found["scores"], strict=True):
            np.testing.assert_allclose(learned, looked, rtol=0, atol=1e-5)
        rows = [0.0, *found["scores"][0][0]]
        assert found["alone"][: len(rows)] == rows, "entry t is about token t"
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-4)
        assert found["together"].keys() == found["by_itself"].keys()
        for name, own in found["by_itself"].items():
            joined = found["together"][name]
            for kind in ("scores", "looks"):
                for row, wanted in zip(joined[kind], own[kind], strict=True):
                    np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-5)
            assert joined["losses"] == pytest.approx(own["losses"], rel=1e-5)
            assert joined["gradients"].keys() == own["gradients"].keys()
            for key, wanted in own["gradients"].items():
                assert np.linalg.norm(joined["gradients"][key] - wanted) <= 5e-5 * np.linalg.norm(wanted), (name, key)
    assert any(own["gradients"] for own in ranks[0]["by_itself"].values())
    for key in ("scores", "losses", "parts", "last"):
        assert ranks[0][key] == ranks[1][key], f"{key}: equal on every rank"

"""Sizes of the exchanges of all layers at once: the passes are those of sizes that each layer counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.distributed.engine_ranks import Case
from tests.support.distributed.oracle import make_model, random_adapter
from tests.support.distributed.sized_ranks import both, padded
from tests.support.distributed.spawn import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "names", "known"),
    [
        (Case("ep2", 2, ep=2), ("a",), 1.0),
        (Case("ep2_some_unknown", 2, ep=2), ("a",), 0.9),
        (Case("tp2_ep2_recompute", 2, tp=2, ep=2, recompute="full", dropout=True), ("a",), 1.0),
        (Case("pp2_ep2_virtual", 4, ep=2, pp=2, stages=(1, 1, 1, 1)), ("a", "b"), 1.0),
        (Case("ep2_etp2_cp2_shared", 4, kind="moe+shared", ep=2, etp=2, cp=2, budget=75), ("a",), 1.0),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_replayed_passes_equal_those_that_count_every_layer(
    case: Case, names: tuple[str, ...], known: float, tmp_path: Path
) -> None:
    """Float32, 1e-5 of a tensor's norm; nothing is counted by layer where all routes are known."""
    adapter = {name: values.numpy() for name, values in random_adapter(case.kind, 9).items()}
    args = make_model(tmp_path, "moe"), case, adapter, names, known
    for (plain, every), (sized, counted) in run_ranks(both, case.world, tmp_path, args, timeout_s=200.0):
        assert every > 0
        assert counted == (0 if known == 1.0 else every)
        assert plain.keys() == sized.keys()
        for name, wanted in plain.items():
            assert np.linalg.norm(sized[name] - wanted) <= 1e-5 * np.linalg.norm(wanted), name


@pytest.mark.slow
def test_padding_goes_to_all_experts(tmp_path: Path) -> None:
    """Equal tokens would all choose the same. The scores are those of one rank, whose micro-batch has no padding."""
    path = make_model(tmp_path, "moe")
    (_, whole), *_ = run_ranks(padded, 1, tmp_path, (path, Case("one", 1)), timeout_s=200.0)
    (_, first), (counts, _) = run_ranks(padded, 2, tmp_path, (path, Case("ep2", 2, ep=2)), timeout_s=200.0)
    assert np.allclose(first, whole, atol=1e-5)
    for each in counts:
        assert sum(each) > 100
        assert max(each) - min(each) <= 1

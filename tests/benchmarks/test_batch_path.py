"""Bytes of a token on its way to a trainer rank: they may only fall."""

from __future__ import annotations

import numpy as np
import pytest
from batch_path import body, stages

LIMITS = {
    "answer": 8.6,
    "trajectories": 9.2,
    "ledger": 11.0,
    "channel": 12.9,
    "decode": 9.2,
    "pack": 8.6,
    "collate": 5.1,
}


@pytest.fixture(scope="module")
def held() -> dict[str, float]:
    bodies = [body(np.random.default_rng(0), 4096)]
    return {name: stage.held / (16 * 4352) for name, stage in stages(bodies)}


@pytest.mark.parametrize("name", LIMITS)
def test_no_stage_has_an_object_per_token(held: dict[str, float], name: str) -> None:
    assert held[name] <= LIMITS[name]

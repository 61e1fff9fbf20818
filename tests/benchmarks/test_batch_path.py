"""Bytes of a token on its way to a trainer rank: they may only fall."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch_path import body, stages

from tests.support.solo_exchange import SoloExchange

LIMITS = {
    "answer": 8.6,
    "trajectories": 9.2,
    "ledger": 11.0,
    "channel": 12.9,
    "decode": 9.2,
    "pack": 8.6,
    "share": 8.6,
    "collate": 13.0,
}


@pytest.fixture(scope="module")
def held() -> dict[str, float]:
    exchange: Any = SoloExchange()
    bodies = [body(np.random.default_rng(0), 4096)]
    return {name: stage.held / (16 * 4352) for name, stage in stages(bodies, exchange)}


@pytest.mark.parametrize("name", LIMITS)
def test_no_stage_has_an_object_per_token(held: dict[str, float], name: str) -> None:
    assert held[name] <= LIMITS[name]

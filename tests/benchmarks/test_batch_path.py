"""Bytes of a token on its way to a trainer rank: they may only fall."""

from __future__ import annotations

import numpy as np
import pytest
from batch_path import body, stages

from areal_lora.tokens import RouteShape

LIMITS = {
    "answer": 8.6,
    "trajectories": 9.2,
    "ledger": 11.0,
    "channel": 12.9,
    "decode": 9.2,
    "pack": 8.6,
    "collate": 5.1,
}


SHAPE = RouteShape(layers=48, per_token=8, experts=128)


@pytest.fixture(scope="module", params=[None, SHAPE], ids=["without routes", "with routes"])
def held(request: pytest.FixtureRequest) -> dict[str, float]:
    """Beside the bytes of routes, 15 % of them reserved by encoders, which the batch has as int16."""
    bodies = [body(np.random.default_rng(0), 4096, request.param)]
    found = {name: stage.held / (16 * 4352) for name, stage in stages(bodies, request.param)}
    routes = 384 if request.param else 0
    more = {"ledger": 1.15, "channel": 1.15, "collate": 2}
    return {name: n_bytes - routes * more.get(name, 1) for name, n_bytes in found.items()}


@pytest.mark.parametrize("name", LIMITS)
def test_no_stage_has_an_object_per_token(held: dict[str, float], name: str) -> None:
    assert held[name] <= LIMITS[name]

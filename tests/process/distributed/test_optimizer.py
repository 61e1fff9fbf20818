"""Ranks that share an adapter's step take the step of one rank, bit for bit, and hold each moment once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from areal_lora.engine.common.adapter_optimizer import AdapterOptimizer, GradientClass
from tests.support.distributed import optimizer_ranks as case
from tests.support.distributed.spawn import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("optimizer")
    return run_ranks(case.share_steps, case.WORLD, folder, ())


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One rank with the summed gradients; its steps are compared with torch's in the unit tests."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    memory = case.make_memory()
    size = memory.arena.size
    optimizer = AdapterOptimizer(case.CONFIG, memory, [GradientClass(start=0, end=size, groups=[])])
    stats = []
    for step in range(case.STEPS):
        memory.grads.copy_(torch.stack([case.gradient(rank, step, size) for rank in range(case.WORLD)]).sum(0))
        stats.append(optimizer.step(1.0, 0.01).values)
    dist.destroy_process_group()
    moments = {name: moment.numpy() for name, moment in optimizer.moments.items()}
    return {"stats": stats, "weights": memory.weights.numpy(), "moments": moments}


def test_every_rank_has_the_weights_moments_and_norms_of_one(
    ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert [bool(step["skipped"]) for step in alone["stats"]] == [step == case.SKIPPED for step in range(case.STEPS)], (
        "one gradient is not finite"
    )
    assert alone["stats"][0]["grad_norm"] > case.CONFIG.max_grad_norm, "it is clipped"
    for rank in ranks:
        np.testing.assert_equal(rank["stats"], alone["stats"])
        assert rank["weights"].tobytes() == alone["weights"].tobytes()
        for name, moment in alone["moments"].items():
            assert rank["moments"][name].tobytes() == moment.tobytes()
            assert rank["doubled"][name].tobytes() == (2 * moment).tobytes()
        assert not rank["left"]


def test_moments_are_whole_after_as_many_slices_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """As many as the largest memory has."""
    most = -(-4 * case.make_memory().arena.size // case.SLICE_BYTES)
    assert [rank["slices"] for rank in ranks] == [most] * case.WORLD


def test_each_moment_is_held_once(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for name, moment in alone["moments"].items():
        assert [rank["held"][name] for rank in ranks] == [len(moment) // case.WORLD] * case.WORLD

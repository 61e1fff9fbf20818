"""Scores reach the ranks that have the tokens, over gloo in layouts of four ranks; routes the layers of a stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from areal_lora.config.models import TrainerConfig
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.micro_batches import of_stage, plans_of
from areal_lora.families.shape import ModelShape
from tests.support.distributed.scores_ranks import deliver
from tests.support.distributed.spawn import run_ranks
from tests.support.families.tiny_families import TINY

LAYOUTS = {
    "dp 4": ParallelLayout(world=4, tp=1, pp=1, ep=1, etp=1, stage_layers=(2,), experts=0),
    "dp 2, tp 2": ParallelLayout(world=4, tp=2, pp=1, ep=1, etp=1, stage_layers=(2,), experts=0),
    "dp 2, cp 2": ParallelLayout(world=4, tp=1, pp=1, ep=1, etp=1, stage_layers=(2,), experts=0, cp=2),
    "dp 2, pp 2": ParallelLayout(world=4, tp=1, pp=2, ep=1, etp=1, stage_layers=(1, 1), experts=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_rank_receives_the_scores_of_its_part(tmp_path: Path, minibatches: int) -> None:
    random = Random(minibatches)
    batch = scoring_batch([[1] * random.randint(1, 50) for _ in range(23)], "a")
    lengths = batch.cu_seqlens.diff().numpy()
    ranks = run_ranks(deliver, 4, tmp_path, (list(LAYOUTS.values()), batch, minibatches), timeout_s=200.0)
    for name, found in zip(LAYOUTS, zip(*ranks, strict=True), strict=True):
        for rank, (held, part, whole, nbytes) in enumerate(found):
            want = np.arange(len(part), dtype=np.float32)
            assert whole.tolist() == want.tolist(), "without a part every rank has all"
            own = np.ones_like(held) if rank == 0 else held
            assert part.tolist() == np.where(np.repeat(own, lengths), want, 0).tolist(), f"{name}, rank {rank}"
            most = int(lengths[own].sum()) * 4
            if rank and name == "dp 4" and minibatches == 1:
                assert nbytes == 0, "it has computed its part"
            assert nbytes <= most < 4 * len(part) or rank == 0


def test_a_stage_takes_the_routes_of_its_layers_with_experts() -> None:
    shape = ModelShape.from_hf(TINY["qwen3_moe"] | {"num_hidden_layers": 5, "mlp_only_layers": [1, 4]})
    batch, routes = scoring_batch([[1, 2, 3]], "a"), torch.arange(9).view(3, 3, 1).repeat(1, 1, 2) % 4
    batch = replace(batch, routes=routes.to(torch.int16))
    for stages, wanted in (
        ((2, 2, 1), ([0], [1, 2], [])),
        ((1, 1, 3), ([0], [], [1, 2])),
        ((1, 1, 1, 1, 0, 1), ([0, 2], [], [1])),
    ):
        layout = ParallelLayout(world=3, tp=1, pp=3, ep=1, etp=1, stage_layers=stages, experts=4)
        for rank, layers in enumerate(wanted):
            found = of_stage(batch, ShardedModel(shape=shape, layout=layout), rank).routes
            assert found is not None
            assert found.tolist() == routes[:, layers].tolist()


@pytest.mark.parametrize(("dispatcher", "chunk"), [("alltoall", 1), ("deepep", 1), ("hybridep", 128)])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_ranks_compute_whole_chunks_of_their_dispatcher(dispatcher: str, chunk: int, tp: int, cp: int) -> None:
    """HybridEP's kernels take multiples of 128 tokens a rank."""
    trainer = TrainerConfig(world_size=4, ep=2, tp=tp, cp=cp, moe_dispatcher=dispatcher)
    batch = scoring_batch([[1] * n for n in (50, 300, 7, 501)], "a")
    plans = plans_of(batch, ParallelLayout.of(trainer, layers=2, experts=4), 512)
    assert plans
    assert {plan.n_tokens % (chunk * tp * cp) for plan in plans} == {0}

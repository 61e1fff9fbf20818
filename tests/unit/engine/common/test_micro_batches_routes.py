"""What routers choose in one pass reaches the ranks that compute the sequences in another one, over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from areal_lora.data.collate import scoring_batch
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.families.shape import ModelShape
from tests.support.distributed.route_ranks import choice, record
from tests.support.distributed.spawn import run_ranks
from tests.support.families.tiny_families import TINY

SHARED = 20
SHAPE = {"num_hidden_layers": 4, "mlp_only_layers": [3]}
ONE = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "stage_layers": (4,)}
LAYOUTS = {
    "dp 4": {},
    "dp 2, tp 2": {"tp": 2},
    "dp 2, cp 2": {"cp": 2},
    "tp 2, cp 2": {"tp": 2, "cp": 2},
    "dp 2, virtual stages": {"pp": 2, "stage_layers": (1, 1, 1, 1)},
    "dp 2, pp 2, a stage without experts": {"pp": 2, "stage_layers": (4, 0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("experts", [4, 300])
def test_each_rank_has_the_routes_of_its_layers_and_sequences(tmp_path: Path, experts: int) -> None:
    """Minibatches are cut otherwise than the whole batch; three answers to each prompt of 20 tokens are a tree."""
    print(f"seed {experts}")
    random, minibatches = Random(experts), 3
    prompts = [[random.randrange(999) for _ in range(SHARED)] for _ in range(7)]
    rows = [
        prompt + [random.randrange(999) for _ in range(random.randint(1, 40))] for prompt in prompts for _ in range(3)
    ]
    batch = replace(scoring_batch(rows, "a"), group_ids=torch.arange(7).repeat_interleave(3))
    shape = ModelShape.from_hf(TINY["qwen3_moe"] | SHAPE | {"num_experts": experts})
    lengths, wanted = batch.cu_seqlens.diff().numpy(), choice(batch.token_ids, [0, 1, 2], shape).numpy()
    layouts = [ParallelLayout(world=4, experts=experts, **{**ONE, **own}) for own in LAYOUTS.values()]  # type: ignore[arg-type]
    ranks = run_ranks(record, 4, tmp_path, (layouts, shape, batch, minibatches), timeout_s=200.0)
    of_stage = {"dp 2, virtual stages": ([0, 2], [1]), "dp 2, pp 2, a stage without experts": ([0, 1, 2], [])}
    for name, layout, found in zip(LAYOUTS, layouts, zip(*ranks, strict=True), strict=True):
        own = of_stage.get(name, ([0, 1, 2],))
        for rank, (needed, routes, nbytes) in enumerate(found):
            layers, others = own[rank // layout.ranks_per_stage], {0, 1, 2} - {*own[rank // layout.ranks_per_stage]}
            want = wanted[np.repeat(needed, lengths)]
            assert np.array_equal(routes[:, layers], want[:, layers]), f"{name}, rank {rank}"
            assert (routes[:, [*others]] == -1).all()
            assert nbytes <= want[:, layers].size * (1 if experts == 4 else 2), "what it needs, and no more"
        assert layout.dp == 1 or sum(int(nbytes) for _, _, nbytes in found) > 0

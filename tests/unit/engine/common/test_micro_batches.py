"""Scores reach the ranks that have the tokens, over gloo in layouts of four ranks; routes the layers of a stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_lora.config.models import TrainerConfig
from areal_lora.data.collate import MicroPlan, Tree, plan_microbatches, scoring_batch
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.micro_batches import computed_by, flops_of, of_stage, parts_of, plans_of, runs_of
from areal_lora.families.shape import ModelShape
from areal_lora.types import TrainBatch
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


def seconds(plans: list[MicroPlan], pp: int) -> int:
    """Of a pipeline without virtual stages: micro-batch by micro-batch, a stage after the one before it and itself."""
    ends = [0] * pp
    for plan in plans:
        for stage in range(pp):
            ends[stage] = max(ends[stage], ends[stage - 1] if stage else 0) + plan.n_tokens
    return ends[-1]


@pytest.mark.parametrize(
    ("n", "dp", "pp", "most"), [(64, 8, 4, 0.7), (64, 2, 8, 0.4), (128, 4, 8, 0.6), (256, 4, 8, 0.8)]
)
def test_pipeline_stages_have_micro_batches_that_keep_them_busy(n: int, dp: int, pp: int, most: float) -> None:
    """Against the plan of the whole budget, and the best of all budgets: micro-batches have a cost of their own."""
    random = Random(n)
    lengths = [min(4000, round(random.lognormvariate(6.8, 0.6))) for _ in range(n)]
    trees, budget = [Tree(sequences=(i,), shared=0) for i in range(n)], 32_768
    trainer = TrainerConfig(world_size=dp * pp, pp=pp)
    batch = scoring_batch([[i] * length for i, length in enumerate(lengths)], "a")
    plans = plans_of(batch, ParallelLayout.of(trainer, layers=pp, experts=0), budget)
    each = [
        seconds(plan_microbatches(trees, lengths, dp=dp, token_budget=tokens, uniform=True), pp)
        for tokens in (budget, *range(max(lengths), budget, 512))
    ]
    print(f"seed {n}: {len(plans)} of {plans[0].n_tokens}, {seconds(plans, pp)} of {each[0]}, best {min(each)}")
    assert seconds(plans, pp) < most * each[0]
    assert seconds(plans, pp) < 1.25 * min(each)
    assert plans[0].n_tokens > 1024, "the launches of less take longer than its tokens"


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize(
    ("lengths", "frame", "count"), [([30_000, 900, 900, 900], 30_000, 2), ([8000] * 160, 32_000, 40)]
)
def test_a_longest_sequence_and_many_micro_batches_keep_the_budget(
    lengths: list[int], frame: int, count: int, virtual: int
) -> None:
    trainer = TrainerConfig(world_size=4, pp=4, pp_layers=[1] * 4 * virtual)
    layout = ParallelLayout.of(trainer, layers=4 * virtual, experts=0)
    plans = plans_of(scoring_batch([[i] * n for i, n in enumerate(lengths)], "a"), layout, 32_000)
    assert {plan.n_tokens for plan in plans} == {frame}
    assert len(plans) == (count if virtual == 1 else max(4, count)), "virtual stages take four in turn"


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize(("n", "dp", "pp"), [(64, 8, 4), (256, 4, 8), (128, 2, 2)])
def test_a_pass_over_some_sequences_computes_them_where_their_tokens_are(
    n: int, dp: int, pp: int, virtual: int
) -> None:
    random = Random(n)
    lengths = [min(4000, round(random.lognormvariate(6.8, 0.6))) for _ in range(n)]
    trainer = TrainerConfig(world_size=dp * pp, pp=pp, pp_layers=[1] * pp * virtual)
    layout = ParallelLayout.of(trainer, layers=pp * virtual, experts=0)
    batch = scoring_batch([[i] * length for i, length in enumerate(lengths)], "a")
    held = parts_of(batch, 1, layout, 32_768)
    only = torch.tensor([random.random() < 0.1 for _ in range(n)])
    sample = replace(batch, only=only)
    found = computed_by(plans_of(sample, layout, 32_768), sample, layout)
    assert not (found & ~held).any(), f"seed {n}"
    assert (found.any(0) | ~only.numpy()).all()


def trees_of(batch: TrainBatch) -> list[Tree]:
    """What one rank computes, in the order of its sequences."""
    (plan,) = plans_of(batch, ParallelLayout.of(TrainerConfig(world_size=1), layers=1, experts=0), 1 << 20)
    return sorted((tree for trees in plan.trees for tree in trees), key=lambda tree: tree.sequences)


@pytest.mark.parametrize("adapters", ["a" * 8, "aaaabbbb"])
def test_answers_share_the_prompt_of_their_group_and_adapter(adapters: str) -> None:
    """Two groups of one prompt, or adapters; some answers begin alike, too."""
    rows = [[1] * 50 + [2] * more + [3 + i] * 40 for i, more in enumerate([0, 3, 3, 1, 0, 0, 3, 3])]
    of = torch.arange(8) // 4 * (adapters == "a" * 8)
    trees = trees_of(replace(scoring_batch(rows, "a"), group_ids=of, adapters=tuple(adapters)))
    assert trees == [Tree(sequences=(0, 1, 2, 3), shared=50), Tree(sequences=(4, 5, 6, 7), shared=50)]


def test_turns_of_an_agent_share_prefixes_that_grow() -> None:
    """Each turn is a sequence, whose thoughts no later one has; four samples of one prompt.

    The bound is four times the nodes of a trie; over the system prompt, all they have in common, it is ten times.
    """
    draw, rows = Random(0), list[list[int]]()
    for _ in range(4):
        history = [1] * 200
        for _ in range(40):
            rows.append(history + [draw.randrange(2, 99) for _ in range(60)])
            history = history + [draw.randrange(2, 99) for _ in range(60)]
    batch, nodes = scoring_batch(rows, "a"), dict[tuple[int, int], int]()
    for row in rows:
        at = 0
        for token in row:
            at = nodes.setdefault((at, token), len(nodes) + 1)
    trees = trees_of(batch)
    assert [i for tree in trees for i in tree.sequences] == list(range(len(rows)))
    assert all(len({tuple(rows[i][: tree.shared]) for i in tree.sequences}) == 1 for tree in trees)
    computed = sum(tree.size([len(row) for row in rows]) for tree in trees)
    print(f"seed 0: {computed} tokens, {len(nodes)} nodes of a trie, {sum(map(len, rows)) - 200 * 159} with one tree")
    assert computed < 4 * len(nodes)


def test_a_start_that_saves_less_than_it_costs_is_not_shared() -> None:
    """A main agent and a helper in turns have three tokens of the template in common."""
    trees = trees_of(scoring_batch([[1] * 3 + [2 + i % 2] * 100 for i in range(6)], "a"))
    assert trees == [Tree(sequences=(i,), shared=0) for i in range(6)]


def test_without_a_gradient_a_micro_batch_is_apart_and_counts_forward_only() -> None:
    """A unit of work a token: forward 1, training 3, computed again 1."""
    lengths = [400, 300, 200, 100, 350, 250, 150, 50]
    zero = torch.tensor([True, False, True, False, False, True, False, True])
    batch = replace(scoring_batch([[i] * n for i, n in enumerate(lengths)], "a"), zero_advantage=zero)
    plans = plans_of(batch, ParallelLayout.of(TrainerConfig(world_size=2), layers=1, experts=0), 512)
    found = {gradient: sorted(of(plans, gradient)) for gradient in (True, False)}
    assert found == {gradient: (zero != gradient).nonzero().flatten().tolist() for gradient in (True, False)}
    assert [[plan.gradient for plan in part] for part in runs_of(plans, train=True)] == [[True], [False]]
    assert [len(part) for part in runs_of(plans, train=False)] == [2]
    units: Any = SimpleNamespace(
        forward=lambda tokens, *_: tokens, training=lambda tokens, *_: 3 * tokens, recompute=lambda tokens, _: tokens
    )
    active, idle = 900, 900
    counts = {kind: flops_of(plans, batch, {"a": units}, kind) for kind in (None, "none", "full")}
    assert counts == {
        None: {"flops": active + idle},
        "none": {"flops": 3 * active + idle},
        "full": {"flops": 3 * active + idle, "recomputed_flops": active},
    }


def of(plans: list[MicroPlan], gradient: bool) -> list[int]:
    chosen = (tree for plan in plans if plan.gradient == gradient for trees in plan.trees for tree in trees)
    return [i for tree in chosen for i in tree.sequences]


@pytest.mark.parametrize(
    ("lengths", "zero", "parallel", "apart"),
    [
        ([500] * 8, 4, {}, True),
        ([400] * 8 + [20], 1, {}, False),  # one more micro-batch, and no backward pass less
        ([500] * 8, 2, {"pp": 8}, False),  # the pipeline would fill once more
        ([500] * 64, 40, {"pp": 4}, True),
    ],
)
def test_what_has_no_gradient_is_apart_where_that_takes_less_time(
    lengths: list[int], zero: int, parallel: dict[str, int], apart: bool
) -> None:
    batch = scoring_batch([[i] * n for i, n in enumerate(lengths)], "a")
    batch = replace(batch, zero_advantage=torch.arange(len(lengths)) >= len(lengths) - zero)
    layout = ParallelLayout.of(TrainerConfig(world_size=parallel.get("pp", 1), **parallel), layers=8, experts=0)
    plans = plans_of(batch, layout, 500)
    assert [len(runs_of(plans, train=train)) for train in (True, False)] == [1 + apart, 1]
    assert sorted(i for gradient in (True, False) for i in of(plans, gradient)) == [*range(len(lengths))]
    if parallel:
        [scored] = runs_of(plans, train=False, uniform=True)
        assert {plan.n_tokens for plan in scored} == {max(plan.n_tokens for plan in plans)}

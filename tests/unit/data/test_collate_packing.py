"""Token trees and the micro-batch plan: every sequence once, equal sizes on all ranks, the budget kept."""

from __future__ import annotations

import sys
from itertools import combinations, pairwise
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from areal_lora.data.collate import MicroPlan, Tree, find_trees, groups_of_starts, plan_microbatches
from areal_lora.data.packed_groups import shared_starts
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import PassSizes

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def singles(lengths: list[int]) -> list[Tree]:
    return [Tree(sequences=(i,), shared=0) for i in range(len(lengths))]


def trees_of(rows: list[list[int]], groups: list[int]) -> list[Tree]:
    return find_trees([len(row) for row in rows], shared_starts([np.array(row) for row in rows]), groups)


def loads(plan: MicroPlan, lengths: list[int]) -> list[int]:
    return [sum(tree.size(lengths) for tree in trees) for trees in plan.trees]


# ------------------------------------------------------------ trees


def test_a_group_shares_its_common_start() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7]]
    assert trees_of(rows, [0, 0, 0]) == [Tree(sequences=(0, 1, 2), shared=2)]


def test_groups_share_nothing_with_each_other() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 6]]
    assert trees_of(rows, [0, 0, 1, 1]) == [Tree(sequences=(0, 1), shared=2), Tree(sequences=(2, 3), shared=2)]


def test_equal_sequences_keep_one_token_of_their_own() -> None:
    assert trees_of([[1, 2, 3], [1, 2, 3]], [0, 0]) == [Tree(sequences=(0, 1), shared=2)]


@pytest.mark.parametrize("rows", [[[1, 2], [3, 2]], [[1], [1, 2]]])
def test_without_a_common_start_every_sequence_is_alone(rows: list[list[int]]) -> None:
    assert trees_of(rows, [0, 0]) == singles([2, 2])


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=12), size=st.integers(1, 4)
)
def test_a_tree_is_the_longest_common_start(rows: list[list[int]], size: int) -> None:
    trees = trees_of(rows, [i // size for i in range(len(rows))])
    assert [i for tree in trees for i in tree.sequences] == list(range(len(rows)))
    for tree in trees:
        members = [rows[i] for i in tree.sequences]
        assert len({tuple(row[: tree.shared]) for row in members}) == 1
        assert all(len(row) > tree.shared for row in members)
        if len(members) > 1:
            more = {tuple(row[: tree.shared + 1]) for row in members}
            assert len(more) > 1 or any(len(row) == tree.shared + 1 for row in members)


# ------------------------------------------------------------ the plan


@st.composite
def groups_of_sequences(draw: st.DrawFn) -> tuple[list[Tree], list[int]]:
    trees: list[Tree] = []
    lengths: list[int] = []
    for _ in range(draw(st.integers(1, 12))):
        n, shared = draw(st.integers(1, 8)), draw(st.integers(1, 80))
        at = len(lengths)
        lengths += [shared + draw(st.integers(1, 120)) for _ in range(n)]
        trees.append(Tree(sequences=tuple(range(at, at + n)), shared=shared if n > 1 else 0))
    return trees, lengths


@given(
    case=groups_of_sequences(),
    dp=st.integers(1, 5),
    budget=st.integers(1, 900),
    multiple=st.sampled_from([1, 2, 8]),
    uniform=st.booleans(),
    rounds=st.sampled_from([1, 1, 2, 3]),
)
def test_plan_is_exact_and_fits(
    case: tuple[list[Tree], list[int]], dp: int, budget: int, multiple: int, uniform: bool, rounds: int
) -> None:
    trees, lengths = case
    budgets = {"token_budget": budget, "multiple": multiple, "uniform": uniform or rounds > 1, "rounds": rounds}
    plans = plan_microbatches(trees, lengths, dp=dp, **budgets)
    assert len(plans) % rounds == 0
    held = [tree for plan in plans for part in plan.trees for tree in part]
    assert sorted(i for tree in held for i in tree.sequences) == list(range(len(lengths)))
    starts = {i: tree.shared for tree in trees for i in tree.sequences}
    for tree in held:
        assert all(tree.shared == (starts[i] if len(tree.sequences) > 1 else 0) for i in tree.sequences)
    for plan in plans:
        assert len(plan.trees) == dp
        assert plan.n_tokens % multiple == 0
        for part, load in zip(plan.trees, loads(plan, lengths), strict=True):
            assert load <= plan.n_tokens
            assert load <= budget or [len(tree.sequences) for tree in part] == [1]
    if uniform or rounds > 1:
        assert len({plan.n_tokens for plan in plans}) == 1


def counts_in_order(trees: list[Tree], lengths: list[int], dp: int, budget: int, rounds: int) -> tuple[int, list[int]]:
    """The first number of micro-batches, one after the other, whose parts all fit, and the sizes of these parts."""
    total = sum(tree.size(lengths) for tree in trees)
    count = -(-total // (dp * budget * rounds)) * rounds
    while True:
        share, parts = max(1, -(-total // (dp * count))), list[tuple[int, bool]]()
        for tree in trees:
            size, own = tree.size(lengths), sorted((lengths[i] - tree.shared for i in tree.sequences), reverse=True)
            limit = tree.shared + -(-sum(own) // -(-size // share))
            if len(own) == 1 or size <= min(share, budget):
                parts.append((size, len(own) == 1))
                continue
            held = [own[:1]]
            for n in own[1:]:
                if tree.shared + sum(held[-1]) + n > min(limit, budget):
                    held.append([])
                held[-1].append(n)
            parts += [(tree.shared + sum(each), len(each) == 1) for each in held]
        bins = [list[int]() for _ in range(dp * count)]
        for size, _ in sorted(parts, reverse=True):
            min(bins, key=sum).append(size)
        if all(len(each) < 2 or sum(each) <= budget for each in bins):
            return count, sorted(size for size, _ in parts)
        count += rounds


@pytest.mark.parametrize("seed", range(30))
def test_the_plan_is_that_of_the_first_number_of_micro_batches_that_fits(seed: int) -> None:
    """Against a search in which every number of micro-batches packs all of its parts."""
    print("seed", seed)
    random, lengths, trees = Random(seed), list[int](), list[Tree]()
    for _ in range(random.choice([1, 4, 12])):
        n, shared, at = random.choice([1, 2, 5, 8]), random.choice([1, 9, 80]), len(lengths)
        lengths += [shared + random.choice([random.randint(1, 300), 150, 7]) for _ in range(n)]
        trees.append(Tree(sequences=tuple(range(at, at + n)), shared=shared if n > 1 else 0))
    dp, rounds = random.choice([1, 2, 3]), random.choice([1, 1, 2])
    budget = random.choice([20, 170, 400, 1000])
    plans = plan_microbatches(trees, lengths, dp=dp, token_budget=budget, rounds=rounds, uniform=rounds > 1)
    count, sizes = counts_in_order(trees, lengths, dp, budget, rounds)
    filled = min(count, -(-len(sizes) // dp))
    assert len(plans) == (-(-filled // rounds) * rounds)
    assert sorted(tree.size(lengths) for plan in plans for part in plan.trees for tree in part) == sizes

    only = [random.random() < 0.1 for _ in lengths]
    few = plan_microbatches(trees, lengths, dp=dp, token_budget=budget, rounds=rounds, uniform=rounds > 1, only=only)
    wanted = [p.trees for p in plans if any(only[i] for part in p.trees for tree in part for i in tree.sequences)]
    assert [plan.trees for plan in few] == wanted + [((),) * dp] * (-len(wanted) % rounds)


@given(lengths=LENGTHS, dp=st.integers(1, 5))
def test_ranks_get_equal_shares(lengths: list[int], dp: int) -> None:
    for plan in plan_microbatches(singles(lengths), lengths, dp=dp, token_budget=2000):
        held = loads(plan, lengths)
        # LPT: the largest bin exceeds the smallest by at most one sequence.
        assert max(held) - min(held) <= max(lengths)


def test_many_sequences_leave_little_padding() -> None:
    lengths = [70 - i % 12 for i in range(512)]
    plans = plan_microbatches(singles(lengths), lengths, dp=2, token_budget=8192)
    computed = sum(2 * plan.n_tokens for plan in plans)
    assert computed < 1.02 * sum(lengths)


def test_eight_answers_to_a_prompt_compute_the_prompt_once() -> None:
    lengths = [55 + 20 + i % 5 for i in range(512)]
    trees = [Tree(sequences=tuple(range(g, g + 8)), shared=55) for g in range(0, 512, 8)]
    plans = plan_microbatches(trees, lengths, dp=2, token_budget=8192)
    computed = sum(2 * plan.n_tokens for plan in plans)
    assert computed < 1.02 * (64 * 55 + sum(n - 55 for n in lengths))


def test_a_tree_beyond_an_equal_share_is_split_and_repeats_its_start() -> None:
    lengths = [30, 30, 30, 30]
    (plan,) = plan_microbatches([Tree(sequences=(0, 1, 2, 3), shared=10)], lengths, dp=2, token_budget=100)
    assert [[len(tree.sequences) for tree in part] for part in plan.trees] == [[2], [2]]
    assert plan.n_tokens == 50


def test_a_sequence_beyond_the_budget_is_alone() -> None:
    plans = plan_microbatches(singles([500, 10, 10]), [500, 10, 10], dp=1, token_budget=100)
    assert plans[0].trees == ((Tree(sequences=(0,), shared=0),),)
    assert plans[0].n_tokens == 500


@pytest.mark.parametrize("dp", [1, 2])
def test_equal_input_gives_an_equal_plan(dp: int) -> None:
    lengths = [5, 5, 9, 9, 1]
    first, second = (plan_microbatches(singles(lengths), lengths, dp=dp, token_budget=20) for _ in range(2))
    assert first == second


# ------------------------------------------------------------ attention's part


@given(case=groups_of_sequences())
def test_pairs_are_those_that_attention_computes(case: tuple[list[Tree], list[int]]) -> None:
    """Position k of a sequence attends to k + 1 keys; those of the shared start count once."""
    trees, lengths = case
    for tree in trees:
        starts = sum(k + 1 for k in range(tree.shared))
        own = sum(k + 1 for i in tree.sequences for k in range(tree.shared, lengths[i]))
        assert tree.pairs(lengths) == starts + own


QWEN3_30B = ModelShape.from_hf(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }
)


def waits(plans: list[MicroPlan], lengths: list[int], sizes: PassSizes) -> tuple[float, float]:
    """FLOPs of the slowest rank over the mean: where ranks meet in every micro-batch, and where only at the end.

    Every rank computes the padding; the mean is that of the useful FLOPs.
    """
    dp = len(plans[0].trees)
    totals, met = [0] * dp, 0
    for plan in plans:
        pairs = [sum(tree.pairs(lengths) for tree in trees) for trees in plan.trees]
        done = [sizes.training(plan.n_tokens, n) for n in pairs]
        totals = [total + n for total, n in zip(totals, done, strict=True)]
        met += max(done)
    held = [tree for plan in plans for trees in plan.trees for tree in trees]
    useful = sum(sizes.training(tree.size(lengths), tree.pairs(lengths)) for tree in held) / dp
    return met / useful, max(totals) / useful


@pytest.mark.parametrize(("dp", "most"), [(2, (1.03, 1.01)), (8, (1.10, 1.05)), (16, (1.22, 1.15))])
def test_ranks_wait_little_for_each_other_when_lengths_have_a_long_tail(dp: int, most: tuple[float, float]) -> None:
    """512 answers of a log-normal law, median 3,000, at most 32,000 tokens.

    In order of tokens: 1.12, 1.53 and 1.71 times the mean where ranks meet; 1.04, 1.25 and 1.24 at the end of a step.
    """
    random = Random(0)
    lengths = [300 + min(32_000, round(random.lognormvariate(8.0, 1.0))) for _ in range(512)]
    plans = plan_microbatches(singles(lengths), lengths, dp=dp, token_budget=32_768)
    met, at_the_end = waits(plans, lengths, PassSizes.of(QWEN3_30B, None))
    print(f"seed 0, dp {dp}: {met:.3f} where ranks meet in every micro-batch, {at_the_end:.3f} at the end of a step")
    assert met < most[0]
    assert at_the_end < most[1]


@pytest.mark.parametrize("seed", range(40))
def test_groups_of_starts_save_as_much_as_any(seed: int) -> None:
    """Against all ways to cut up to eight sequences into runs; a run saves its least start but for its first."""
    print("seed", seed)
    draw = np.random.default_rng(seed)
    starts = draw.choice([0, 3, 15, 16, 20, 40, 300], draw.integers(1, 9))
    starts[0] = 0
    n, counted = len(starts), np.where(starts < 16, 0, starts)

    def saved(cuts: list[int]) -> int:
        bounds = pairwise([0, *cuts, n])
        return sum(int(counted[a + 1 : b].min()) * (b - a - 1) for a, b in bounds if b - a > 1)

    every = [list(cuts) for k in range(n) for cuts in combinations(range(1, n), k)]
    numbers = groups_of_starts(starts)
    assert set(np.diff(numbers)) <= {0, 1}
    assert saved([i for i in range(1, n) if numbers[i] != numbers[i - 1]]) == max(map(saved, every))


@pytest.mark.parametrize("seed", range(60))
def test_groups_of_starts_are_those_of_the_quadratic_loop(seed: int) -> None:
    """Of all groups that end at a sequence the one that saves most with those before it, the shortest of several."""
    print("seed", seed)
    draw, n = np.random.default_rng(seed), 200
    nested = np.minimum.accumulate(draw.integers(16, 400, (4, n)), axis=1)[draw.integers(0, 4, n), np.arange(n)]
    kinds = (
        draw.choice([0, 8, 16, 17, 20, 40, 300], n),
        draw.integers(16, 60, n),
        np.sort(draw.integers(0, 999, n)),
        nested,
    )
    starts = kinds[seed % 4] if seed % 8 < 4 else kinds[seed % 4][::-1]
    counted = np.where(starts < 16, 0, starts)
    saved, first = [0], list[int]()
    for end in range(1, n + 1):
        totals = [saved[a] + int(counted[a + 1 : end].min(initial=10**9)) * (end - a - 1) for a in range(end)]
        first.append(max(range(end), key=lambda a: (totals[a], a)))
        saved.append(totals[first[-1]])
    cuts, end = [], n
    while end:
        end = first[end - 1]
        cuts.append(end)
    numbers = groups_of_starts(starts)
    assert [0, *np.flatnonzero(np.diff(numbers)) + 1] == cuts[::-1]


def test_groups_of_many_starts_take_a_number_of_steps_each() -> None:
    """4,096 answers of 256 prompts with a common head, counted by the lines of the function that run."""
    starts = np.array(([60] + [300] * 15) * 256)
    lines = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code is groups_of_starts.__code__ or event == "line" else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        groups_of_starts(starts)
    finally:
        sys.settrace(before)
    assert lines < 25 * len(starts)


@pytest.mark.parametrize("answers", [16, 1])
def test_groups_below_a_common_head_look_at_few_others(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 sequences, counted by the firsts of groups that each one is compared with."""
    starts, sizes, minimum = np.array(([60] + [300] * (answers - 1)) * (4096 // answers)), list[int](), np.minimum

    def counted(values: np.ndarray, *arguments: Any, **how: Any) -> np.ndarray:
        sizes.append(values.size)
        found: np.ndarray = minimum(values, *arguments, **how)
        return found

    monkeypatch.setattr(np, "minimum", counted)
    numbers = groups_of_starts(starts)
    assert len(sizes) >= len(starts) - 1
    assert sum(sizes) < 32 * len(starts)
    assert len(np.unique(numbers)) == (256 if answers > 1 else 1)


def test_answers_of_each_prompt_are_a_group() -> None:
    """Prompts have a short head or a longer one in common, too; an unlike sequence is alone."""
    for head in (15, 40):
        starts = np.array([0, *[100] * 15, head, *[130] * 15, 0, head])
        assert groups_of_starts(starts).tolist() == [0] * 16 + [1] * 16 + ([2, 3] if head == 15 else [2, 2])

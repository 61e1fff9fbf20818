"""Token trees and the micro-batch plan: every sequence once, equal sizes on all ranks, the budget kept."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lora.data.collate import MicroPlan, Tree, find_trees, plan_microbatches

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def singles(lengths: list[int]) -> list[Tree]:
    return [Tree(sequences=(i,), shared=0) for i in range(len(lengths))]


def trees_of(rows: list[list[int]], groups: list[int]) -> list[Tree]:
    bounds = [0, *accumulate(len(row) for row in rows)]
    return find_trees(np.array([t for row in rows for t in row]), bounds, groups)


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
)
def test_plan_is_exact_and_fits(
    case: tuple[list[Tree], list[int]], dp: int, budget: int, multiple: int, uniform: bool
) -> None:
    trees, lengths = case
    plans = plan_microbatches(trees, lengths, dp=dp, token_budget=budget, multiple=multiple, uniform=uniform)
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
    if uniform:
        assert len({plan.n_tokens for plan in plans}) == 1


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

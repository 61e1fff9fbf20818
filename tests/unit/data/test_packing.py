"""The micro-batch plan: every sequence once, equal frames on all ranks, the budget kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lora.data.packing import plan_microbatches

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(
    lengths=LENGTHS,
    dp=st.integers(1, 5),
    budget=st.integers(1, 900),
    multiple=st.sampled_from([1, 2, 8]),
    uniform=st.booleans(),
)
def test_plan_is_exact_and_fits(lengths: list[int], dp: int, budget: int, multiple: int, uniform: bool) -> None:
    plans = plan_microbatches(lengths, dp=dp, token_budget=budget, multiple=multiple, uniform=uniform)
    seen = [i for plan in plans for rows in plan.rows for i in rows]
    assert sorted(seen) == list(range(len(lengths)))
    for plan in plans:
        assert len(plan.rows) == dp
        assert plan.width % multiple == 0
        for rows in plan.rows:
            assert len(rows) <= plan.n_rows
            assert all(lengths[i] <= plan.width for i in rows)
        assert plan.n_rows == 1 or plan.n_rows * plan.width <= budget
    if uniform:
        assert len({(plan.n_rows, plan.width) for plan in plans}) == 1


@given(lengths=LENGTHS, dp=st.integers(1, 5))
def test_ranks_get_equal_shares(lengths: list[int], dp: int) -> None:
    for plan in plan_microbatches(lengths, dp=dp, token_budget=2000):
        counts = [len(rows) for rows in plan.rows]
        assert max(counts) - min(counts) <= 1


def test_similar_lengths_share_a_micro_batch() -> None:
    lengths = [70 - i % 12 for i in range(512)]
    plans = plan_microbatches(lengths, dp=2, token_budget=8192)
    computed = sum(2 * plan.n_rows * plan.width for plan in plans)
    assert computed < 1.1 * sum(lengths)


def test_a_sequence_beyond_the_budget_is_alone() -> None:
    plans = plan_microbatches([500, 10, 10], dp=1, token_budget=100)
    assert plans[0].rows == ((0,),)
    assert (plans[0].n_rows, plans[0].width) == (1, 500)


@pytest.mark.parametrize("dp", [1, 2])
def test_equal_input_gives_an_equal_plan(dp: int) -> None:
    lengths = [5, 5, 9, 9, 1]
    assert plan_microbatches(lengths, dp=dp, token_budget=20) == plan_microbatches(lengths, dp=dp, token_budget=20)

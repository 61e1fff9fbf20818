"""The order in which parts are sent."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from areal_lora.distributed.store import _links


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_every_rank_gets_its_part_once_from_one_that_has_it(of_ranks: list[int]) -> None:
    has = {rank: {of_ranks[rank]} if rank == 0 else set[int]() for rank in range(len(of_ranks))}
    for source, target in _links(of_ranks):
        part = of_ranks[target]
        assert source == 0 or part in has[source]
        assert not has[target], "once"
        has[target].add(part)
    assert all(has.values())


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 64])
def test_rank_0_sends_each_part_once_and_its_own_as_a_tree(size: int) -> None:
    of_ranks = [rank // size for rank in range(5 * size)]
    links = _links(of_ranks)
    assert [target for source, target in links if source == 0][:4] == [size, 2 * size, 3 * size, 4 * size]
    for part in range(5):
        first = part * size
        sends = sum(source == first and of_ranks[target] == part for source, target in links)
        assert sends == math.ceil(math.log2(size))

"""Strided copies and sums of chunks against the compiled loops, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.kernels import ITEM_BYTES, Block, TensorBlocks
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.strided import ChunkSums, StridedCopies
from tests.support.sizes import size
from tests.support.weight_sync.helpers import KEYS

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@settings(max_examples=size(60, 600), deadline=None)
@given(
    kinds=st.tuples(st.sampled_from(sorted(TYPES)), st.sampled_from(sorted(TYPES))),
    forms=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([1.0, 0.3])), min_size=1, max_size=3
    ),
    repeats=st.integers(1, 9),
    gaps=st.integers(0, 3),
    odd=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_plan_is_the_plan_of_the_compiled_loops(
    kinds: tuple[str, str], forms: list[tuple[int, int, float]], repeats: int, gaps: int, odd: bool, seed: int
) -> None:
    """Blocks that repeat, with gaps, two memories on each side, several slots; a common source; one out of order."""
    rng = np.random.default_rng(seed)
    a, b = ITEM_BYTES[kinds[0]], ITEM_BYTES[kinds[1]]
    room = sum(rows * (cols + gaps) for rows, cols, _ in forms) * repeats + 1
    tensors, at = [], 0
    for i in range(repeats):
        for j, (rows, cols, scale) in enumerate(forms):
            shared = odd and j == 0
            source = (0 if shared else at) + (room if i % 2 else 0)
            target = at + (room if i >= repeats // 2 else 0)
            place = Block(source * a, cols * a, target * b, (cols + gaps) * b, rows, cols, 2 * room * b, scale)
            tensors.append([place] if not (shared and i == 1) else [])
            at += rows * (cols + gaps)
    if odd:
        tensors.reverse()
    plan = TensorBlocks.of(tensors, *kinds)
    source = torch.randn(2 * room, generator=torch.Generator().manual_seed(seed)).to(TYPES[kinds[0]])
    want, got = (torch.full((6 * room,), 9.0).to(TYPES[kinds[1]]) for _ in range(2))
    strided = StridedCopies(plan, (0, room * a), (0, room * b))
    cut = int(rng.integers(0, len(tensors) + 1))
    for part in ((0, cut), (cut, len(tensors))):
        plan.copy(source.data_ptr(), want.data_ptr(), slot=1, tensors=part)
        strided.copy(source.split(room), (got, got[room:]), part, slot=1)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert len(strided._batches[0, cut]) <= plan.first[cut]


def test_bytes_that_are_absent_are_not_counted() -> None:
    plan = TensorBlocks.of([[Block(16, 0, 8, 0, 1, 4)]], "float32", "bfloat16")
    source, target = torch.arange(4.0), torch.zeros(4, dtype=torch.bfloat16)
    StridedCopies(plan, (0,), (0,)).copy((source,), (target,), (0, 1), skipped=(16, 8))
    assert target.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_fingerprints_are_those_of_the_compiled_loops(dtype: str) -> None:
    """Tensors of one element, of whole chunks and one more or less; odd numbers of bfloat16; what is not finite."""
    spec = AdapterSpec(name="a", base_model="m", rank=4, alpha=4, target_modules=("linear_qkv",))
    shapes = [(1,), (7, 1), (1023, 1), (1024, 1), (2047, 1), (2048, 1), (2049, 1), (4097, 1), *[(16, 300)] * 5, (1,)]
    layout = make_layout(spec, dtype, {0: [(f"t{i}", shape) for i, shape in enumerate(shapes)]}, {})
    table, n = layout.tables[0], len(shapes)
    values = torch.randn(layout.nbytes // ITEM_BYTES[dtype], generator=torch.Generator().manual_seed(1))
    for place, poison in ((9, np.nan), (-1, -np.inf), (2000, np.inf)):
        values[place] = poison
    flat = values.to(TYPES[dtype]).view(torch.uint8)
    sums = ChunkSums(table)
    for cuts in ((0, n), (0, 3, 4, n)):
        want, got = table.marks(KEYS.multipliers), table.marks(KEYS.multipliers)
        want.measure(flat.data_ptr(), 0, n)
        for first, last in itertools.pairwise(cuts):
            sums.measure(got, flat[table.offsets[first] : table.end(last)], first, last)
        assert got.sums.tolist() == want.sums.tolist()
        assert got.bad.tolist() == want.bad.tolist()
        assert 3 <= got.bad.sum() < n

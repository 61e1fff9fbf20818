"""A row that several ranks compute together: their parts are the whole row, in tokens, attention and predictions.

The ranks take turns in this process: what they would gather is made before. tests/process/distributed has real ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from areal_lora.data.collate import MicroPlan, Tree
from areal_lora.engine.layers.attention import PackedMicroBatch, attend, pack, to_sequences
from areal_lora.engine.layers.context import ContextGroup
from tests.support.distributed.engine_ranks import every_token, make_batch
from tests.support.engine.layers import plain_attention

ROWS = [[7] * 9 + [1, 2], [7] * 9 + [3], [7] * 9 + [4, 5, 6, 7, 8], [9, 9, 1], [5] * 23, [2]]
TREES = (Tree(sequences=(0, 1, 2), shared=9), *(Tree(sequences=(i,), shared=0) for i in (3, 4, 5)))
HEADS, GROUPS, WIDTH, VALUES = 4, 2, 8, 6
CPU, N = torch.device("cpu"), 60
"""Tokens of the row, padding included: of the last parts some have none that is real."""


def whole_and_parts(size: int) -> tuple[PackedMicroBatch, list[PackedMicroBatch]]:
    batch, plan = every_token(make_batch(ROWS)), MicroPlan(trees=(TREES,), n_tokens=N)
    groups = (ContextGroup(rank=rank, size=size) for rank in range(size))
    return pack(batch, plan, 0, CPU), [pack(batch, plan, 0, CPU, group) for group in groups]


def order(size: int) -> Tensor:
    return torch.from_numpy(ContextGroup(rank=0, size=size).places(N))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_parts_together_are_the_row(size: int) -> None:
    whole, parts = whole_and_parts(size)
    each = [(part.token_ids.view(-1), part.tokens.keys, part.attention.positions) for part in parts]
    gathered = map(torch.cat, zip(*each, strict=True))
    wanted = (whole.token_ids.view(-1), whole.tokens.keys, whole.attention.positions)
    for got, want in zip(gathered, wanted, strict=True):
        assert torch.equal(got[order(size)], want)
    assert sum(part.attention.n for part in parts) == whole.attention.n
    assert all(part.sequences == whole.sequences for part in parts)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_part_has_runs_of_the_adapters_of_the_row(size: int) -> None:
    batch = make_batch(ROWS)
    batch = replace(batch, adapters=tuple("ab"[i in (3, 5)] for i in range(batch.n_sequences)))
    plan = MicroPlan(trees=(TREES,), n_tokens=N)
    whole = pack(batch, plan, 0, CPU)
    parts = [pack(batch, plan, 0, CPU, ContextGroup(rank=rank, size=size)) for rank in range(size)]
    assert whole.tokens.owners is not None
    gathered = torch.cat([part.tokens.owners for part in parts if part.tokens.owners is not None])
    assert torch.equal(gathered[order(size)], whole.tokens.owners)
    for part in (whole, *parts):
        assert part.tokens.owners is not None
        assert part.tokens.ends is not None
        assert part.tokens.ends.tolist() == part.tokens.owners.bincount(minlength=2).cumsum(0).tolist()
        assert torch.equal(part.tokens.owners, part.tokens.owners.sort().values)


def test_a_rank_has_an_early_and_a_late_part() -> None:
    """With equal costs under a causal mask: each pair of parts has N tokens before it on average."""
    for size in (2, 3, 5):
        starts = [sum(first for first, _ in ContextGroup(rank=rank, size=size).parts(N)) for rank in range(size)]
        assert len(set(starts)) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_equal_work_also_where_several_sequences_share_the_row(size: int) -> None:
    """Of pairs (query, key); with one zigzag over the row the slowest of four has up to 2.5 times the mean."""
    for lengths in ([3200], [2000, *[100] * 12], [700, 1500, 200, 500, 300]):
        batch = make_batch([[i] * n for i, n in enumerate(lengths)])
        trees = tuple(Tree(sequences=(i,), shared=0) for i in range(len(lengths)))
        plan = MicroPlan(trees=(trees,), n_tokens=3200)
        parts = [pack(batch, plan, 0, CPU, ContextGroup(rank=rank, size=size)).attention for rank in range(size)]
        pairs = [int((part.positions[: part.n] + 1).sum()) for part in parts]
        print(lengths, max(pairs) * size / sum(pairs))
        assert sum(pairs) == sum(n * (n + 1) // 2 for n in lengths)
        assert max(pairs) * size < 1.4 * sum(pairs)
        if len(lengths) == 1:  # as many as `config.sizing.activations.pass_elements` counts
            assert {len(part.window(None).keys) for part in parts} == {3200 * (4 * size + 0.5) / size}


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_attention_and_gradients_are_those_of_the_row(
    size: int, window: int | None, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flash:
        plain_attention.install(monkeypatch)
    torch.manual_seed(size)
    whole, parts = whole_and_parts(size)
    heads = [torch.randn(N, *shape) for shape in ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES))]
    q, k, v = (x.requires_grad_() for x in heads)
    expected = attend(whole.attention, q, k, v, window=window)
    factors = torch.randn(expected.shape)
    wanted = torch.autograd.grad((expected * factors).sum(), (q, k, v))
    inverse = order(size).argsort()
    monkeypatch.setattr(ContextGroup, "gather", lambda self, x: torch.cat([k, v], dim=2)[inverse])
    total = torch.zeros(())
    for rank, part in enumerate(parts):
        own = inverse.chunk(size)[rank]
        found = attend(part.attention, q[own], k[own], v[own], window=window)
        torch.testing.assert_close(found, expected[own], atol=1e-6, rtol=1e-5)
        total = total + (found * factors[own]).sum()
    for got, want in zip(torch.autograd.grad(total, (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_a_common_start_is_kept_once_for_all_of_its_branches(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 branches of one token after a start of 30: a late part of the row sees the start a dozen times."""
    plain_attention.install(monkeypatch)
    branches, n = 16, 48
    tree = Tree(sequences=tuple(range(branches)), shared=30)
    batch, plan = make_batch([[7] * 30 + [i] for i in range(branches)]), MicroPlan(trees=((tree,),), n_tokens=n)
    part = pack(batch, plan, 0, CPU, ContextGroup(rank=0, size=2)).attention
    assert len(part.window(window).keys) > 6 * n
    k, v = (torch.randn(n, GROUPS, WIDTH, requires_grad=True) for _ in range(2))
    q = torch.randn(n // 2, HEADS, WIDTH, requires_grad=True)
    monkeypatch.setattr(ContextGroup, "gather", lambda self, x: torch.cat([k, v], dim=2))
    kept = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend(part, q, k[: n // 2], v[: n // 2], window=window)
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept if x.is_floating_point()}
    row, own = 2 * n * GROUPS * WIDTH, 2 * part.n * HEADS * WIDTH + part.n * HEADS  # k, v; q, its output, log-sum-exps
    assert sum(held.values()) <= 4 * (row + 2 * own), "bytes: some are views of more"


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_token_is_predicted_once_by_the_rank_of_the_token_before(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = whole_and_parts(size)

    def score(packed: PackedMicroBatch) -> Tensor:
        """Of a model that looks at both tokens of a prediction."""
        return (packed.token_ids[0, packed.sources] * 100 + packed.targets).float()

    assert sum(len(part.sources) for part in parts) == len(whole.sources)
    rows = [torch.nn.functional.pad(score(part), (0, part.predictions - len(part.sources))) for part in parts]
    monkeypatch.setattr(ContextGroup, "gather", lambda self, x, equal: torch.cat(rows))
    for part in parts:
        assert torch.equal(to_sequences(score(part), part), to_sequences(score(whole), whole))


def test_a_group_of_padding_alone_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MicroPlan(trees=(TREES, ()), n_tokens=N)
    packed = pack(make_batch(ROWS), plan, 1, CPU, ContextGroup(rank=1, size=2))
    monkeypatch.delattr(ContextGroup, "gather")
    x = torch.randn(N // 2, 2, 4, requires_grad=True)
    assert not attend(packed.attention, x, x, x).any()
    assert packed.sources.numel() == packed.predictions == 0

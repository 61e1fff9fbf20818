"""Trees to one row and back: entry t stays with token t, shared starts are computed once, padding is dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from areal_lora.data.collate import MicroPlan, Tree
from areal_lora.engine.layers.attention import PackedMicroBatch, pack, to_sequences
from areal_lora.engine.layers.context import ContextGroup
from tests.support.distributed.engine_ranks import every_token, make_batch

ROWS = [[11, 12, 13], [21], [31, 32, 33, 34], [31, 32, 43]]
TREES = ((Tree(sequences=(2, 3), shared=2), Tree(sequences=(1,), shared=0)), (Tree(sequences=(0,), shared=0),))
PLAN = MicroPlan(trees=TREES, n_tokens=8)
EMPTY = MicroPlan(trees=((Tree(sequences=(0,), shared=0),), ()), n_tokens=4)
CPU = torch.device("cpu")


def packed_on(device: torch.device = CPU) -> PackedMicroBatch:
    return pack(every_token(make_batch(ROWS)), PLAN, 0, device)


def test_a_shared_start_stands_once_and_positions_restart_in_each_branch() -> None:
    packed = packed_on()
    assert packed.token_ids.tolist() == [[31, 32, 33, 34, 43, 21, 0, 0]]
    assert packed.attention.positions.tolist() == [0, 1, 2, 3, 2, 0, 0, 0]
    assert packed.sequences == (2, 3, 1)
    (micro,) = packed.micros
    assert micro.token_ids.tolist() == [31, 32, 33, 34, 31, 32, 43, 21]


def test_both_branches_are_predicted_from_the_end_of_the_shared_start() -> None:
    packed = packed_on()
    assert packed.sources.tolist() == [0, 1, 2, 1]
    assert packed.targets.tolist() == [32, 33, 34, 43]


def test_each_sequence_reads_the_predictions_of_its_tokens() -> None:
    packed = packed_on()
    # A model whose "score" of a prediction is the target token itself.
    assert to_sequences(packed.targets.float(), packed).tolist() == [0, 32, 33, 34, 0, 32, 43, 0]


def test_a_shared_prediction_gets_the_gradient_of_each_sequence() -> None:
    packed = packed_on()
    values = torch.zeros(4, requires_grad=True)
    (to_sequences(values, packed) * torch.tensor([0, 1.0, 2, 3, 0, 10, 20, 0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [11, 2, 3, 20]


@pytest.mark.parametrize(
    ("firsts", "sources", "targets", "read"),
    [
        ((2, 2), [1, 2, 1], [33, 34, 43], [0, 0, 33, 34, 0, 0, 43, 0]),
        ((1, 9), [0, 1, 2], [32, 33, 34], [0, 32, 33, 34, 0, 0, 0, 0]),  # of a start for one of its sequences
        ((9, 9), [], [], [0] * 8),
    ],
)
def test_only_tokens_that_a_loss_reads_are_predicted(
    firsts: tuple[int, int], sources: list[int], targets: list[int], read: list[int]
) -> None:
    """The mask of the sequences of the tree starts at their tokens ``firsts``, that of others nowhere."""
    each = zip(ROWS, (9, 9, *firsts), strict=True)
    mask = torch.cat([torch.arange(len(row)) >= first for row, first in each])
    routes = torch.zeros(len(mask), 1, 2, dtype=torch.int16)
    batch = replace(make_batch(ROWS), loss_mask=mask, routes=routes)
    packed = pack(batch, PLAN, 0, CPU)
    assert (packed.sources.tolist(), packed.targets.tolist()) == (sources, targets)
    assert to_sequences(packed.targets.float(), packed).tolist() == read
    assert packed.followed is not None
    assert set(packed.followed.tolist()) == {0, 1, 2}, "attention reads them whatever the mask"
    parts = [pack(batch, PLAN, 0, CPU, ContextGroup(rank=rank, size=2)) for rank in (0, 1)]
    assert sum(len(part.sources) for part in parts) == len(sources)
    by_client = pack(replace(batch, weights=mask.float()), PLAN, 0, CPU)
    assert by_client.targets.tolist() == [32, 33, 34, 43], "clients get the log-probabilities of all tokens"


def test_the_trees_of_an_adapter_follow_each_other() -> None:
    batch = make_batch(ROWS)
    mixed = replace(batch, adapters=("c", "b", *("a",) * (batch.n_sequences - 2)))
    packed = pack(mixed, PLAN, 0, CPU)
    assert packed.sequences == (1, 2, 3), "in the order in which the batch names them"
    assert packed.tokens.owners is not None
    assert packed.tokens.ends is not None
    assert packed.tokens.ends.tolist() == [0, 1, 8], "one has no sequence here, and padding is the last one's"
    part = packed.tokens.part(1, 4)
    assert part.ends is not None
    assert part.ends.tolist() == [0, 0, 4]
    assert packed.tokens.owners.tolist() == [1, *[2] * 7]
    assert [(set(micro.adapters), micro.n_tokens) for micro in packed.micros] == [({"b"}, 1), ({"a"}, 7)]
    assert packed.token_ids.tolist() == [[21, 31, 32, 33, 34, 43, 0, 0]]
    alone = pack(batch, PLAN, 0, CPU).tokens
    assert (alone.ends, alone.owners) == (None, None)
    assert torch.equal(alone.part(1, 4).keys, alone.keys[1:5])


def test_a_rank_without_sequences_gets_padding_of_the_same_size() -> None:
    packed = pack(make_batch(ROWS), EMPTY, 1, CPU)
    assert packed.micros == ()
    assert packed.token_ids.tolist() == [[0] * 4]
    assert packed.index.numel() == packed.sources.numel() == 0
    assert packed.attention.n == 0


def test_a_batch_is_packed_on_the_host_whatever_the_default_device_is() -> None:
    batch, want = every_token(make_batch(ROWS)), packed_on()
    torch.set_default_device("meta")
    try:
        got = pack(batch, PLAN, 0, CPU)
        padding = pack(batch, EMPTY, 1, CPU)
        values = to_sequences(got.targets.float(), got)
    finally:
        torch.set_default_device(None)
    for name in ("token_ids", "sources", "targets", "index"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.attention.positions, want.attention.positions)
    assert got.micros[0].token_ids.device == padding.index.device == values.device == CPU
    assert values.tolist() == [0, 32, 33, 34, 0, 32, 43, 0]


def test_a_batch_reaches_the_device_that_was_asked_for() -> None:
    packed = packed_on(torch.device("meta"))
    (micro,), plan = packed.micros, packed.attention
    tensors = [packed.token_ids, packed.index, micro.token_ids, micro.cu_seqlens, plan.positions]
    passes = [plan.own, plan.shared, plan.window(3)]
    tensors += [
        t for p in passes if p for t in (p.runs.cu_q, p.runs.cu_k, p.queries, p.keys) if isinstance(t, torch.Tensor)
    ]
    assert {t.device.type for t in tensors} == {"meta"}


def test_kept_ids_lie_with_the_predictions_of_their_tokens() -> None:
    batch = every_token(make_batch(ROWS))
    kept = batch.token_ids[:, None] + torch.tensor([[0, 100]], dtype=torch.int32)
    for rank, want in ((None, [32, 33, 34, 43]), (0, [32]), (1, [33, 34, 43])):
        context = None if rank is None else ContextGroup(rank=rank, size=2)
        packed = pack(replace(batch, kept=kept), PLAN, 0, CPU, context)
        assert packed.kept is not None
        assert packed.targets.tolist() == want
        assert packed.kept.tolist() == [[target, target + 100] for target in want]
    assert packed_on().kept is None
    padding = pack(replace(batch, kept=kept), EMPTY, 1, CPU).kept
    assert padding is not None
    assert padding.shape == (0, 2)


def test_routes_lie_with_their_tokens() -> None:
    """Those of a shared start are its first sequence's; padding has none."""
    batch = make_batch(ROWS)
    rows = batch.token_ids.to(torch.int16)[:, None, None] + torch.tensor([[[0, 100], [200, 300], [400, 500]]]).short()
    rows[8:10] += 1000  # those of the start in its second sequence
    packed = pack(replace(batch, routes=rows), PLAN, 0, CPU)
    found = packed.tokens.routes
    assert found is not None
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.int16, (8, 3, 2), True)
    assert found[:, 0, 0].tolist() == [31, 32, 33, 34, 43, 21, -1, -1]
    assert found[:, 2, 1].tolist() == [531, 532, 533, 534, 543, 521, -1, -1]
    padding = pack(replace(batch, routes=rows), EMPTY, 1, CPU).tokens.routes
    assert padding is not None
    assert (padding == -1).all()

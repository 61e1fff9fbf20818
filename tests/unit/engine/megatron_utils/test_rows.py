"""Packed to rows and back: entry t stays with token t, and padding is dropped."""

from __future__ import annotations

import torch

from areal_lora.data.packing import MicroPlan
from areal_lora.engine.megatron_utils.rows import causal_mask, make_rows, next_token_targets, packed_from_rows
from tests.support.distributed.engine_ranks import make_batch

ROWS = [[11, 12, 13], [21], [31, 32, 33, 34], [41, 42]]
PLAN = MicroPlan(rows=((2, 1), (0,)), n_rows=3, width=5)
CPU = torch.device("cpu")


def test_rows_hold_sequences_from_position_zero() -> None:
    rows = make_rows(make_batch(ROWS), PLAN, 0, CPU)
    assert rows.token_ids.tolist() == [[31, 32, 33, 34, 0], [21, 0, 0, 0, 0], [0] * 5]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert rows.micro is not None
    assert rows.micro.token_ids.tolist() == [31, 32, 33, 34, 21]
    assert rows.token_ids.reshape(-1)[rows.index].tolist() == rows.micro.token_ids.tolist()


def test_prediction_at_position_i_is_the_entry_of_token_i_plus_1() -> None:
    rows = make_rows(make_batch(ROWS), PLAN, 0, CPU)
    targets = next_token_targets(rows.token_ids)
    # A model whose "score" of a prediction is the target token itself.
    assert packed_from_rows(targets.float(), rows).tolist() == [0, 32, 33, 34, 0]


def test_gradient_reaches_only_predictions_of_real_tokens() -> None:
    rows = make_rows(make_batch(ROWS), PLAN, 0, CPU)
    values = torch.zeros(3, 5, requires_grad=True)
    packed_from_rows(values, rows).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 1, 1, 0, 0], [0] * 5, [0] * 5]


def test_a_rank_without_sequences_gets_padding_of_the_same_frame() -> None:
    rows = make_rows(make_batch(ROWS), MicroPlan(rows=((0,), ()), n_rows=2, width=4), 1, CPU)
    assert rows.micro is None
    assert rows.token_ids.shape == (2, 4)
    assert rows.index.numel() == 0


def test_mask_forbids_the_future() -> None:
    mask = causal_mask(3, CPU)
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].tolist() == [[False, True, True], [False, False, True], [False, False, False]]


def test_rows_are_made_on_the_host_whatever_the_default_device_is() -> None:
    batch = make_batch(ROWS)
    want = make_rows(batch, PLAN, 0, CPU)
    torch.set_default_device("meta")
    try:
        got = make_rows(batch, PLAN, 0, CPU)
        padding = make_rows(batch, MicroPlan(rows=((0,), ()), n_rows=2, width=4), 1, CPU)
        packed = packed_from_rows(next_token_targets(got.token_ids).float(), got)
    finally:
        torch.set_default_device(None)
    for name in ("token_ids", "position_ids", "index"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.micro is not None
    assert got.micro.token_ids.device == padding.index.device == packed.device == CPU
    assert packed.tolist() == [0, 32, 33, 34, 0]


def test_rows_reach_the_device_that_was_asked_for() -> None:
    rows = make_rows(make_batch(ROWS), PLAN, 0, torch.device("meta"))
    assert rows.micro is not None
    tensors = (rows.token_ids, rows.position_ids, rows.index, rows.micro.token_ids, rows.micro.cu_seqlens)
    assert {t.device.type for t in tensors} == {"meta"}

"""Weights and denominators of the reductions."""

from __future__ import annotations

import pytest
import torch

from areal_lora.algorithms.losses import denominator, sequence_sums, spread, token_weights


@pytest.mark.parametrize(
    ("reduction", "weights", "divisor"),
    [("token", [0, 1, 1, 0, 1], 3.0), ("sequence", [0, 0.5, 0.5, 0, 1], 2.0), ("constant", [0, 1, 1, 0, 1], 20.0)],
)
def test_reductions(reduction: str, weights: list[float], divisor: float) -> None:
    mask = torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 3, 5])
    assert token_weights(mask, cu_seqlens, reduction).tolist() == weights
    assert denominator(mask, cu_seqlens, reduction, max_new_tokens=10) == divisor


@pytest.mark.parametrize(("reduction", "divisor"), [("token", 2.0), ("sequence", 1.0), ("constant", 10.0)])
def test_sequences_without_a_trained_token_do_not_count_and_no_divisor_is_0(reduction: str, divisor: float) -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 0], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 3, 5, 6])
    assert denominator(mask, cu_seqlens, reduction, max_new_tokens=10) == divisor
    assert denominator(mask & False, cu_seqlens, reduction, max_new_tokens=10) == (10.0 if divisor == 10.0 else 1.0)


def test_sums_and_spread_keep_to_their_sequence() -> None:
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    sums = sequence_sums(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), cu_seqlens)
    assert sums.tolist() == [3.0, 0.0, 28.0]
    assert spread(sums, cu_seqlens).tolist() == [3.0, 3.0, 28.0, 28.0, 28.0]

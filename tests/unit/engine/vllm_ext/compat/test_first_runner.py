"""What a truncated distribution keeps: no more than k of equal logits."""

from __future__ import annotations

import math

import torch

from tests.support.lazy import Lazy

runner = Lazy("areal_lora.engine.vllm_ext.compat.first_runner")


def test_of_equal_logits_no_more_than_k_are_kept() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [0.0, 3.0, 2.0, 2.0, 1.0], [-1.0, -2.0, -3.0, -4.0, -5.0]])
    found = runner.keep_first(logits.clone(), torch.tensor([2, 3, 5]))
    assert (found > -math.inf).sum(1).tolist() == [2, 3, 5]
    assert found[1].tolist() == [-math.inf, 3.0, 2.0, 2.0, -math.inf]
    assert torch.equal(found[2], logits[2])

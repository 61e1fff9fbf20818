"""What a truncated distribution keeps: no more than k of equal logits, and only that of a token's log-probabilities."""

from __future__ import annotations

import math

import torch

from tests.support.lazy import Lazy

engine = Lazy("areal_lora.engine.vllm_ext.compat.engine")
logprobs = Lazy("vllm.logprobs")


def test_of_equal_logits_no_more_than_k_are_kept() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [0.0, 3.0, 2.0, 2.0, 1.0], [-1.0, -2.0, -3.0, -4.0, -5.0]])
    found = engine.keep_first(logits.clone(), torch.tensor([2, 3, 5]))
    assert (found > -math.inf).sum(1).tolist() == [2, 3, 5]
    assert found[1].tolist() == [-math.inf, 3.0, 2.0, 2.0, -math.inf]
    assert torch.equal(found[2], logits[2])


def test_what_truncation_removes_takes_no_space() -> None:
    made = logprobs.FlatLogprobs()
    engine.append_kept(made, [7, 9, 7, 3], [-1.0, -0.5, -1.0, -math.inf], (), ())
    engine.append_kept(made, [5, 5], [0.0, 0.0], (), ())
    assert (list(made.token_ids), made.start_indices, made.end_indices) == ([7, 9, 7, 5, 5], [0, 3], [3, 5])
    assert list(made[-1:].logprobs) == [0.0, 0.0]


def test_parts_of_a_stream_are_joined() -> None:
    """vLLM joins those that its reader has not taken."""
    first, second = logprobs.FlatLogprobs(), logprobs.FlatLogprobs()
    engine.append_kept(first, [7, 9], [-1.0, -0.5], (), ())
    engine.append_kept(second, [5], [0.0], (), ())
    engine.append_kept(second, [4, 6], [-2.0, -0.25], (), ())
    joined = logprobs.FlatLogprobs()
    for part in (first[:0], first, second[-2:]):
        engine.extend_kept(joined, part)
    assert (list(joined.token_ids), list(joined.logprobs)) == ([7, 9, 5, 4, 6], [-1.0, -0.5, 0.0, -2.0, -0.25])
    assert (joined.start_indices, joined.end_indices) == ([0, 2, 3], [2, 3, 5])
    assert list(joined[1:].token_ids) == [5, 4, 6]

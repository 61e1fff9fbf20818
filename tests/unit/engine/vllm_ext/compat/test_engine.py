"""What a truncated distribution keeps of a token's log-probabilities."""

from __future__ import annotations

import math

from tests.support.lazy import Lazy

engine = Lazy("areal_lora.engine.vllm_ext.compat.engine")
logprobs = Lazy("vllm.logprobs")


def test_what_truncation_removes_takes_no_space() -> None:
    made = logprobs.FlatLogprobs()
    engine.append_kept(made, [7, 9, 7, 3], [-1.0, -0.5, -1.0, -math.inf], range(4), ())
    engine.append_kept(made, [5, 5], [0.0, 0.0], range(2), ())
    found = made.token_ids, made.start_indices, made.end_indices
    assert [each.tolist() for each in found] == [[7, 9, 7, 5, 5], [0, 3], [3, 5]]
    assert list(made[-1:].logprobs) == [0.0, 0.0]


def test_parts_of_a_stream_are_joined() -> None:
    """vLLM joins those that its reader has not taken."""
    first, second = logprobs.FlatLogprobs(), logprobs.FlatLogprobs()
    engine.append_kept(first, [7, 9], [-1.0, -0.5], range(2), ())
    engine.append_kept(second, [5], [0.0], range(1), ())
    engine.append_kept(second, [4, 6], [-2.0, -0.25], range(2), ())
    joined = logprobs.FlatLogprobs()
    for part in (first[:0], first, second[-2:]):
        engine.extend_kept(joined, part)
    assert (list(joined.token_ids), list(joined.logprobs)) == ([7, 9, 5, 4, 6], [-1.0, -0.5, 0.0, -2.0, -0.25])
    assert (joined.start_indices.tolist(), joined.end_indices.tolist()) == ([0, 2, 3], [2, 3, 5])
    assert list(joined[1:].token_ids) == [5, 4, 6]

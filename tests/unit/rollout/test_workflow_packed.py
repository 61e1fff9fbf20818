"""The one place that lays tokens out, against lists written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_lora.data.packed_groups import check_alignment
from areal_lora.rollout.workflow import PackedTurns, join
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import Generation, Outcome, TokenColumns


def answer(*tokens: int, version: int = 3, finish: str = "stop") -> Generation:
    return Generation(
        columns=TokenColumns.of(tokens, [-t / 100 for t in tokens], [version] * len(tokens)), finish_reason=finish
    )


def test_turns_are_packed_as_written_by_hand() -> None:
    packed = PackedTurns()
    packed.given([5, 6])
    packed.sampled(answer(10, 11, version=4))
    packed.given([7])
    packed.sampled(answer(12, version=3, finish="length"))
    made = packed.trajectory("0:s:2", 2, "math", Score(reward=0.5, outcome=Outcome.OK))
    assert made.token_ids == [5, 6, 10, 11, 7, 12]
    assert made.loss_mask == [0, 0, 1, 1, 0, 1]
    assert made.rollout_logprobs == pytest.approx([0.0, 0.0, -0.10, -0.11, 0.0, -0.12])
    assert made.versions == [-1, -1, 4, 4, -1, 3]
    assert (str(made.adapter), made.sample, made.reward, made.finish_reason) == ("math@v3", 2, 0.5, "length")
    check_alignment(made)


def test_each_token_has_the_route_of_the_first_version_that_read_it() -> None:
    """Also over turns with more than one version: the second one reads all tokens again, and chooses otherwise."""
    packed = PackedTurns()
    packed.given([5, 6])
    first = TokenColumns.of([10, 11], [-0.1, -0.2], [3, 3], bytes([1, 1, 255, 255]))
    packed.sampled(Generation(columns=first, finish_reason="stop", prompt_routes=bytes([1] * 4)))
    packed.given([7])
    second = TokenColumns.of([12], [-0.1], [4], bytes([255, 255]))
    packed.sampled(Generation(columns=second, finish_reason="stop", prompt_routes=bytes([2] * 10)))
    assert list(packed.columns.routes) == [1] * 6 + [2] * 4 + [255] * 2
    assert packed.n_routed == 5
    with pytest.raises(ValueError, match="of routes are not of the same 6 tokens"):
        PackedTurns([TokenColumns.unsampled(packed.token_ids)]).columns.routed(bytes(7))


def routed(ids: list[int], route: int, prompt: int, start: int = 0, last: int = 255) -> Generation:
    """An answer, and its prompt's routes from ``start`` on; a token's route is one byte."""
    columns = TokenColumns.of(ids, [-0.1] * len(ids), [0] * len(ids), bytes([route] * (len(ids) - 1) + [last]))
    return Generation(
        columns=columns, finish_reason="stop", prompt_routes=bytes([route] * (prompt - start)), routes_from=start
    )


def test_a_turn_needs_the_routes_of_the_tokens_since_the_last_one_only() -> None:
    whole, packed, sent = PackedTurns(), PackedTurns(), 0
    for turn in range(100):
        for each in (whole, packed):
            each.given([1, 2, 3])
        n = len(packed)
        part = routed([4, 5, 6, 7], turn, n, packed.n_routed)
        sent += len(part.prompt_routes) + 4
        packed.sampled(part)
        whole.sampled(routed([4, 5, 6, 7], turn, n))
    assert packed.columns == whole.columns
    assert sent == len(packed) + 99, "each token once, and the last of an answer again"


def test_answers_without_routes_get_them_with_the_next_turn() -> None:
    packed = PackedTurns()
    packed.given([1, 2])
    packed.sampled(routed([3], 7, 2))
    packed.sampled(Generation(columns=TokenColumns.of([4, 5], [-0.1] * 2, [0] * 2), finish_reason="stop"))
    assert (packed.n_routed, list(packed.columns.routes)) == (2, [7, 7, 255, 255, 255])
    grammar = routed([6], 8, 5, 2)
    packed.sampled(replace(grammar, columns=TokenColumns.unsampled([6])))
    assert (packed.n_routed, list(packed.columns.routes)) == (5, [7, 7, 8, 8, 8, 255])


def test_a_branch_has_the_routes_that_its_request_left_out() -> None:
    """Two requests continued one conversation at once; the second answer to arrive finds another end."""
    conversations: list[PackedTurns] = []
    join(conversations, [1, 2], routed([3], 7, 2))
    join(conversations, [1, 2, 3, 4], routed([5], 8, 4, start=2))
    made = join(conversations, [1, 2, 3, 9], routed([6], 9, 4, start=2))
    assert [c.token_ids for c in conversations] == [[1, 2, 3, 4, 5], [1, 2, 3, 9, 6]]
    assert list(conversations[0].columns.routes) == [7, 7, 8, 8, 255]
    assert list(made.columns.routes) == [7, 7, 9, 9, 255]


def test_a_completion_continues_the_longest_conversation_that_it_extends() -> None:
    conversations: list[PackedTurns] = []
    join(conversations, [1, 2], answer(3))
    join(conversations, [1, 2, 3, 4], answer(5))  # extends the first
    join(conversations, [1, 2, 3, 9], answer(6))  # the first has gone on another way: a branch of its own
    join(conversations, [1, 2, 3, 4, 5], answer(7))  # nothing between two answers
    join(conversations, [1, 2, 3, 9, 6, 8], answer(2))  # extends the branch
    join(conversations, [1], answer(4))  # shorter than all
    assert [c.token_ids for c in conversations] == [[1, 2, 3, 4, 5, 7], [1, 2, 3, 9, 6, 8, 2], [1, 4]]
    masks = [(c.columns.each_version >= 0).tolist() for c in conversations]
    assert masks == [[0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0, 1], [0, 1]]


def test_of_two_conversations_that_fit_the_longer_goes_on() -> None:
    conversations: list[PackedTurns] = []
    join(conversations, [1, 2, 3, 4], answer(5))
    join(conversations, [1, 2], answer(3))  # later, and a beginning of the first
    join(conversations, [1, 2, 3, 4, 5, 6], answer(7))
    assert [c.token_ids for c in conversations] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3]]


def test_several_answers_to_one_prompt_are_several_conversations() -> None:
    conversations: list[PackedTurns] = []
    for token in (5, 6, 7):
        join(conversations, [1, 2], answer(token))
    join(conversations, [1, 2, 6, 3], answer(8))
    assert [c.token_ids for c in conversations] == [[1, 2, 5], [1, 2, 6, 3, 8], [1, 2, 7]]

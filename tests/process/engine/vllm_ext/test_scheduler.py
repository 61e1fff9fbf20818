"""A group's prompt is computed once, its answers are those of single requests, and each leaves the engine whole."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.engine.vllm_ext import group_engine
from tests.support.engine.vllm_ext.group_engine import FREE_BLOCKS, LENGTHS, NEW_TOKENS, N
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES
from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    said = starter_of(ROLES["rollout.python"]).output(group_engine.__name__, [str(EXAMPLES)], 560.0)
    return json.loads(said.strip().splitlines()[-1])


def differing(some: Any, others: Any) -> float:
    """The share of routes that differ: rounding decides between experts that are equally good for a token."""
    return float((np.sort(some, axis=-1) != np.sort(others, axis=-1)).mean())


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_of_a_group_are_those_of_single_requests(results: dict[str, Any], length: int) -> None:
    group, alone = results[str(length)]["group"], results[str(length)]["alone"]
    assert group["tokens"][:N] == alone["tokens"]
    assert len({tuple(answer) for answer in alone["tokens"]}) == N, "the seeds make no difference"
    for together, single in zip(group["logprobs"], alone["logprobs"], strict=False):
        assert together == pytest.approx(single, abs=1e-5)
    assert {len(routes) for routes in group["routes"]} == {length + NEW_TOKENS - 1}
    assert differing(group["routes"][:N], alone["routes"]) < 0.01


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_is_computed_once(results: dict[str, Any], length: int) -> None:
    """The first sample computes it all, the others its last token; every answer its tokens but the last."""
    decoded = (N + 1) * (NEW_TOKENS - 1)
    assert results[str(length)]["group"]["computed"] == length + (N - 1) + length + decoded


@pytest.mark.parametrize("length", LENGTHS)
def test_an_answer_leaves_the_engine_whole(results: dict[str, Any], length: int) -> None:
    """The second request did not ask for that: it is sent token by token."""
    group = results[str(length)]["group"]
    assert sorted(group["messages"]) == [1] * NEW_TOKENS + [NEW_TOKENS] * N
    assert group["unsent"] == 0
    assert group["free"] == results["free"]


def test_a_burst_of_seeded_prompts_is_served_whole(results: dict[str, Any]) -> None:
    """More prompts than a step has room for: one in two parts would rewind a CPU generator, which vLLM cannot."""
    assert len(results["burst"]) > results["budget"]
    assert {len(answer) for answer in results["burst"]} == {NEW_TOKENS}


def test_a_group_survives_the_abort_of_the_sample_that_computed_the_prompt(results: dict[str, Any]) -> None:
    assert results["aborted"] == {"done": 2, "unsent": 0, "free": results["free"]}


def test_a_request_that_waits_for_the_prompt_keeps_its_place(results: dict[str, Any]) -> None:
    """With places for one group: no request of the second group takes one while the first waits for its prompt."""
    assert [name[0] for name in results["order"]] == ["a"] * N + ["b"] * N


@pytest.mark.parametrize("case", range(len(FREE_BLOCKS)), ids=("enough blocks", "few blocks"))
def test_whole_answers_are_those_that_are_sent_token_by_token(results: dict[str, Any], case: int) -> None:
    """Among streams, with stops, ends, aborts, preemptions, other numbers of log-probabilities."""
    streamed, whole = results["busy"][case]
    assert bool(streamed["preempted"]) == (case == 1)
    for n, (by_token, at_once) in enumerate(zip(streamed["steps"], whole["steps"], strict=True)):
        assert at_once == by_token, f"step {n}"
    assert whole["sent"] == streamed["sent"]
    assert {end for _, _, end, *_ in whole["sent"].values()} >= {"stop", "length"}
    assert all(len(routes) == n + len(tokens) - 1 for tokens, _, _, _, n, routes in whole["sent"].values())
    assert (whole["preempted"], whole["free"], whole["unsent"]) == (streamed["preempted"], results["free"], 0)


def test_a_request_that_was_preempted_has_the_routes_of_one_that_was_not(results: dict[str, Any]) -> None:
    """Once each, in their order: the engine computes its tokens again."""
    enough, few = (results["busy"][case][1] for case in (0, 1))
    again = [
        name for name in few["sent"] if name[:3] in few["preempted"] and few["sent"][name] and name in enough["sent"]
    ]
    pairs = [(few["sent"][name], enough["sent"][name]) for name in again]
    same = [(one[-1], other[-1]) for one, other in pairs if one[0] == other[0]]
    assert len(same) > 1
    one, other = (np.concatenate(each) for each in zip(*same, strict=True))
    assert differing(one, other) < 0.01

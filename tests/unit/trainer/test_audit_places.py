"""Which tokens of long sequences an audit compares, and how many a server computes for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from areal_lora.data.collate import scoring_batch
from areal_lora.trainer.audit import COMPARED, Excerpt, audit, choose
from areal_lora.types import AdapterRef, TrainBatch

NEW = AdapterRef(name="math", version=7)


def batch(n: int, prompt: int, *answer: tuple[int, int]) -> TrainBatch:
    """``n`` sequences with a prompt and then, for each of ``answer``, so many tokens of a version, -1: not sampled."""
    versions = torch.tensor([-1] * prompt + [version for version, count in answer for _ in range(count)])
    made = scoring_batch([[*range(len(versions))]] * n, "math")
    return replace(made, versions=versions.repeat(n), loss_mask=(versions >= 0).repeat(n))


def score(ref: AdapterRef | None, rows: list[list[int]]) -> list[list[float]]:
    return [[0.0] * len(row) for row in rows]


def compared(excerpts: list[Excerpt]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for excerpt in excerpts:
        found.setdefault(excerpt.sequence, []).extend(excerpt.at)
    return found


@pytest.mark.parametrize(("prompt", "answer"), [(3_000, 500), (30_000, 2_000)])
def test_answers_to_long_prompts_are_compared(prompt: int, answer: int) -> None:
    made = batch(3, prompt, (6, answer))
    excerpts = choose(made, "math", 1, max_tokens=40_000)
    for at in compared(excerpts).values():
        assert len(at) == min(answer, COMPARED)
        assert prompt <= min(at) <= max(at) < prompt + answer
    assert all(e.token_ids == [*range(max(e.at) + 1)] for e in excerpts)
    found = audit(excerpts, score, 1e-3)
    assert (found.tokens, found.error) == (2 * min(answer, COMPARED), "")


def test_all_sampled_tokens_are_compared_over_the_steps_but_none_that_a_server_refuses() -> None:
    """Two turns of an agent; 300 steps with two runs each."""
    made, seen = batch(2, 500, (6, 2_000), (-1, 300), (7, 3_000)), set[int]()
    for seed in range(300):
        for at in compared(choose(made, "math", seed, max_tokens=5_000)).values():
            assert len(at) == COMPARED
            seen.update(at)
    wanted = {*range(500, 2_500), *range(2_800, 5_000)}
    assert seen <= wanted
    assert len(seen) > 0.97 * len(wanted)


@pytest.mark.parametrize("answer", [100, 1_500, 6_000])
def test_a_server_scores_two_sequences_and_up_to_four_of_short_ones(answer: int) -> None:
    counts = set[int]()
    for seed in range(40):
        scored = [len(e.token_ids) for e in choose(batch(9, 20, (6, answer)), "math", seed)]
        counts.add(len(scored))
        assert len(scored) == 4 or sum(scored) >= 4_096
        assert len(scored) == 2 or sum(scored[:-1]) < 4_096
    assert counts == {4} if answer == 100 else min(counts) == {1_500: 3, 6_000: 2}[answer]


def test_tokens_behind_those_of_an_older_version_are_not_fresh() -> None:
    """Also where none of these is compared."""
    for made, fresh in ((batch(2, 9, (6, 9), (7, 9_000)), False), (batch(2, 9, (7, 9_009)), True)):
        found = audit(choose(made, "math", 3), score, 1e-3, NEW).rescored
        assert found is not None
        assert len(found.at) == 2 * COMPARED
        assert set(made.versions[found.at].tolist()) == {NEW.version}
        assert set(found.fresh) == {fresh}

"""A shift by one is told from policies that differ, are coarse or change fast; what is not shifted never is."""

from __future__ import annotations

import math
import random

import pytest
import torch

from areal_lora.algorithms.mismatch import FEWEST, after_change, is_shifted, shift_votes

SEEDS = range(40)


def _case(seed: int, n: int = 24, length: int = 60) -> tuple[torch.Tensor, torch.Tensor, random.Random]:
    """Log-probabilities as of an answer: most tokens nearly sure, some not. Packed, with prompts of 5 tokens."""
    rng = random.Random(seed)
    values, mask = [], []
    for _ in range(n):
        answer = rng.randint(1, length)
        values += [0.0] * 5 + [-rng.expovariate(0.5) if rng.random() < 0.4 else -0.01 for _ in range(answer)]
        mask += [False] * 5 + [True] * answer
    return torch.tensor(values), torch.tensor(mask), rng


def _verdict(current: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor) -> bool:
    return is_shifted({name: float(n) for name, n in shift_votes(current, recorded, mask).items()})


def _drifted(recorded: torch.Tensor, seed: int, std: float, towards: float = 0.0) -> torch.Tensor:
    """The policy some versions later: noise, and every token drawn ``towards`` certainty."""
    noise = torch.randn(recorded.shape, generator=torch.Generator().manual_seed(seed)) * std
    return (recorded * (1.0 - towards) + noise).clamp_max(0.0)


@pytest.mark.parametrize(("std", "towards"), [(0.0, 0.0), (0.05, 0.0), (0.3, 0.0), (0.3, 0.5), (0.1, 0.95)])
def test_what_lies_right_is_never_called_shifted(std: float, towards: float) -> None:
    for seed in SEEDS:
        recorded, mask, _ = _case(seed)
        assert not _verdict(_drifted(recorded, seed, std, towards), recorded, mask), f"seed {seed}"


@pytest.mark.parametrize("learned", [0.2, 0.4, 0.5, 0.6, 0.8, 1.0])
def test_answers_that_are_uncertain_in_one_place_only_and_learn_fast_are_not_called_shifted(learned: float) -> None:
    """One choice and then the end: all that can tell are pairs of the same kind, and all move the same way."""
    for seed in SEEDS:
        rng = random.Random(seed)
        recorded, current = [], []
        for _ in range(128):
            p = rng.choice((0.1, 0.25, 0.25, 0.4))
            r = math.log(p)
            c = math.log(p + learned * (0.9 - p)) if rng.random() < 0.8 else r - rng.random()
            recorded += [0.0, r, -0.001]
            current += [0.0, c, -0.001 + 0.01 * -rng.random()]
        mask = torch.tensor([False, True, True] * 128)
        assert not _verdict(torch.tensor(current), torch.tensor(recorded), mask), f"seed {seed}"


@pytest.mark.parametrize(("std", "towards"), [(0.0, 0.0), (0.05, 0.0), (0.3, 0.0), (0.1, 0.3)])
@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_by_one_is_found_at_any_lag(by: int, std: float, towards: float) -> None:
    for seed in SEEDS:
        true, mask, _ = _case(seed)
        recorded = true.clone()
        recorded[mask] = true[mask].roll(by)  # within the answers: masks and prompts show nothing
        assert _verdict(_drifted(true, seed, std, towards), recorded, mask), f"seed {seed}"


def test_too_few_tokens_say_nothing() -> None:
    recorded = torch.tensor([0.0, -3.0, -1.0, -4.0, -0.1])
    mask = torch.tensor([False, True, True, True, True])
    votes = shift_votes(recorded.roll(-1), recorded, mask)
    assert (float(votes["late"]), float(votes["late_own"])) == (2, 0)
    assert FEWEST > 3
    assert not _verdict(recorded.roll(-1), recorded, mask)


def test_no_pair_crosses_sequences() -> None:
    """Entry 0 of a sequence is masked, so the last token of the one before has no neighbour there."""
    recorded = torch.tensor([0.0, -1.0, 0.0, -9.0])
    votes = shift_votes(recorded, recorded, torch.tensor([False, True, False, True]))
    assert sum(votes.values()) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_after_a_change_of_version_in_their_answer_are_marked(seed: int) -> None:
    """An oracle reads token by token; versions rise and stay within answers, and differ between them."""
    rng = random.Random(seed)
    versions, mask, want = [], [], []
    for _ in range(rng.randint(0, 6)):
        prompt, answer, version, changed = rng.randint(1, 4), rng.randint(0, 9), rng.randint(0, 3), False
        versions += [-1] * prompt
        mask += [False] * prompt
        want += [False] * prompt
        for t in range(answer):
            if t and rng.random() < 0.3:
                version, changed = version + 1, True
            versions.append(version)
            mask.append(True)
            want.append(changed)
    got = after_change(torch.tensor(versions, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool))
    assert got.tolist() == want

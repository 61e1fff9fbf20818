"""Advantages against plain Python loops in float64."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from areal_lora.algorithms import advantages


def _random_case(seed: int) -> tuple[list[float], list[int]]:
    rng = random.Random(seed)
    rewards, groups = [], []
    for group in rng.sample(range(100), 9):
        for _ in range(rng.randint(1, 8)):
            rewards.append(float(rng.random() < 0.4) + 0.1 * rng.random())
            groups.append(group)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    return [rewards[i] for i in order], [groups[i] for i in order]


def _members(rewards: list[float], groups: list[int], i: int) -> list[float]:
    return [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_of_several_trajectories_counts_once(seed: int) -> None:
    rewards, groups = _random_case(seed)  # one entry per sample
    rng = random.Random(seed)
    rows = [sample for sample in range(len(rewards)) for _ in range(rng.randint(1, 4))]
    rng.shuffle(rows)
    got = advantages.per_sample(
        advantages.rloo,
        torch.tensor([rewards[s] for s in rows]),
        torch.tensor([groups[s] for s in rows]),
        torch.tensor(rows),
    )
    for i, sample in enumerate(rows):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[sample] and j != sample]
        want = rewards[sample] - statistics.fmean(others) if others else 0.0
        assert float(got[i]) == pytest.approx(want, abs=2e-6), f"seed {seed}, sequence {i}"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_equals_loop(seed: int, normalize_std: bool) -> None:
    rewards, groups = _random_case(seed)
    got = advantages.grpo(torch.tensor(rewards), torch.tensor(groups), normalize_std=normalize_std)
    for i, reward in enumerate(rewards):
        members = _members(rewards, groups, i)
        want = reward - statistics.fmean(members)
        if normalize_std:
            want = want / (statistics.stdev(members) + 1e-6) if len(members) > 1 else 0.0
        assert float(got[i]) == pytest.approx(want, abs=2e-6), f"seed {seed}, sequence {i}"


@pytest.mark.parametrize("seed", range(5))
def test_rloo_equals_leave_one_out_loop(seed: int) -> None:
    rewards, groups = _random_case(seed)
    got = advantages.rloo(torch.tensor(rewards), torch.tensor(groups))
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        want = reward - statistics.fmean(others) if others else 0.0
        assert float(got[i]) == pytest.approx(want, abs=2e-6), f"seed {seed}, sequence {i}"


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_group_without_variance_teaches_nothing(reward: float) -> None:
    same = advantages.grpo(torch.full((8,), reward), torch.zeros(8, dtype=torch.int64), normalize_std=True)
    assert torch.equal(same, torch.zeros(8))


def test_to_tokens_is_zero_off_the_mask() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)
    spread = advantages.to_tokens(torch.tensor([2.0, -3.0]), torch.tensor([0, 3, 6]), mask)
    assert spread.tolist() == [0, 2, 2, 0, 0, -3]

"""Advantages against plain Python loops in float64."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_lora.algorithms.advantages import (
    ADVANTAGES,
    Advantage,
    Discount,
    Samples,
    discounted_sums,
    find_samples,
    gae,
    sample_rewards,
    token_credit,
)
from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.errors import AlignmentError
from areal_lora.types import TrainBatch

SEEDS = range(5)
Case = tuple[list[float], list[int], list[int]]

GROUPED = sorted(set(ADVANTAGES) - {"reinforce_pp", "batch", "remax", "gae", "none"})
"""They compare the answers of one prompt."""


def _case(seed: int) -> Case:
    """Rewards, groups and lengths; some groups have one member, some equal rewards."""
    rng = random.Random(seed)
    rows = []
    for group in rng.sample(range(100), 9):
        same = rng.random() < 0.3
        reward = rng.random()
        for _ in range(rng.randint(1, 8)):
            own = float(rng.random() < 0.4) + 0.1 * rng.random()
            rows.append((reward if same else own, group, rng.randint(1, 40)))
    rng.shuffle(rows)
    rewards, groups, lengths = map(list, zip(*rows, strict=True))
    return rewards, groups, lengths


def _samples(case: Case) -> Samples:
    rewards, groups, lengths = case
    return Samples(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(groups),
        lengths=torch.tensor(lengths, dtype=torch.float64),
        baselines=torch.tensor([_greedy(group) for group in groups], dtype=torch.float64),
    )


def _greedy(group: int) -> float:
    """The reward of a group's greedy answer."""
    return (group * 7 % 10) / 10


def _group(case: Case, i: int) -> list[int]:
    return [j for j, group in enumerate(case[1]) if group == case[1][i]]


def _mean(case: Case, members: list[int]) -> float:
    return statistics.fmean(case[0][j] for j in members)


def _grpo(case: Case, i: int) -> float:
    members = [case[0][j] for j in _group(case, i)]
    if len(set(members)) == 1:
        return 0.0
    return (case[0][i] - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6)


def _rloo(case: Case, i: int) -> float:
    others = [case[0][j] for j in _group(case, i) if j != i]
    return case[0][i] - statistics.fmean(others) if others else 0.0


def _opo(case: Case, i: int) -> float:
    members = _group(case, i)
    return case[0][i] - sum(case[2][j] * case[0][j] for j in members) / sum(case[2][j] for j in members)


def _gpg(case: Case, i: int) -> float:
    silent = [j for j in range(len(case[0])) if len({case[0][k] for k in _group(case, j)}) == 1]
    return len(case[0]) / (len(case[0]) - len(silent)) * _dr_grpo(case, i)


def _dr_grpo(case: Case, i: int) -> float:
    return case[0][i] - _mean(case, _group(case, i))


def _gdpo(case: Case, i: int) -> float:
    """Of one reward."""
    each = [_grpo(case, j) for j in range(len(case[0]))]
    return (each[i] - statistics.fmean(each)) / (statistics.stdev(each) + 1e-6)


def _maxrl(case: Case, i: int) -> float:
    mean = _mean(case, _group(case, i))
    return case[0][i] / mean - 1 if mean > 0 else 0.0


ORACLES: dict[str, Callable[[Case, int], float]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "gdpo": _gdpo,
    "maxrl": _maxrl,
    "rloo": _rloo,
    "opo": _opo,
    "gpg": _gpg,
    "reinforce_pp": lambda case, i: case[0][i],
    "reinforce_pp_baseline": _dr_grpo,
    "batch": lambda case, i: (case[0][i] - statistics.fmean(case[0])) / (statistics.stdev(case[0]) + 1e-6),
    "remax": lambda case, i: case[0][i] - _greedy(case[1][i]),
    "gae": lambda case, i: case[0][i],
    "none": lambda case, i: 0.0,
    "group_mean_batch_std": lambda case, i: _dr_grpo(case, i) / (statistics.stdev(case[0]) + 1e-6),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_equals_the_loop(name: str, seed: int) -> None:
    case = _case(seed)
    got = ADVANTAGES[name].of(_samples(case)).tolist()
    want = [ORACLES[name](case, i) for i in range(len(case[0]))]
    assert got == pytest.approx(want, abs=1e-9), f"seed {seed}"


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_gradient_with_respect_to_the_rewards_equals_finite_differences(name: str) -> None:
    samples = _samples(([0.3, 0.9, 0.1, 0.5, 0.2, 0.7, 0.4], [4, 2, 4, 2, 4, 2, 2], [3, 1, 4, 1, 5, 9, 2]))
    rewards = samples.rewards.clone().requires_grad_()

    def of(values: torch.Tensor) -> torch.Tensor:
        return ADVANTAGES[name].of(replace(samples, rewards=values))

    assert torch.autograd.gradcheck(of, (rewards,))


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_batch_without_variance_teaches_nothing(name: str, reward: float) -> None:
    case = ([reward] * 12, [0] * 7 + [1] * 4 + [2], list(range(1, 13)))
    assert ADVANTAGES[name].of(_samples(case)).tolist() == pytest.approx([0.0] * 12, abs=1e-15)


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_has_advantage_0(name: str) -> None:
    assert float(ADVANTAGES[name].of(_samples(([0.0, 1.0, 0.7], [3, 3, 8], [4, 5, 6])))[2]) == pytest.approx(
        0, abs=1e-12
    )


def _batch(rewards: list[float], groups: list[int], parts: dict[str, list[float]]) -> TrainBatch:
    """Of answers of one token."""
    n = len(rewards)
    return TrainBatch(
        token_ids=torch.zeros(2 * n, dtype=torch.int32),
        cu_seqlens=torch.arange(0, 2 * n + 1, 2),
        loss_mask=torch.tensor([False, True] * n),
        rollout_logprobs=torch.zeros(2 * n),
        versions=torch.tensor([-1, 1] * n),
        shared_starts=torch.zeros(n, dtype=torch.int64),
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
        sample_ids=torch.arange(n),
        given=torch.zeros(n, dtype=torch.bool),
        adapters=("a",) * n,
        components=torch.tensor(list(zip(*parts.values(), strict=True))),
        component_names=tuple(parts),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_several_rewards_are_normalised_apart(seed: int) -> None:
    """With weights of named rewards; parts of a reward have none of their own, and are no rewards."""
    rng, (rewards, groups, lengths) = random.Random(seed), _case(seed)
    other = [rng.choice([0.0, 5.0, rng.random()]) for _ in rewards]
    each = [[_grpo((values, groups, lengths), i) for i in range(len(rewards))] for values in (rewards, other)]
    whole = [a + 0.25 * b for a, b in zip(*each, strict=True)]
    want = [(x - statistics.fmean(whole)) / (statistics.stdev(whole) + 1e-6) for x in whole]
    whole_rewards = [a + 0.25 * b for a, b in zip(rewards, other, strict=True)]
    parts = {"brief": other, "brief/words": [9.0 * rng.random() for _ in rewards], "right": rewards}
    batch = _batch(whole_rewards, groups, parts)
    built = build_algorithm(
        AlgorithmConfig(kind="gdpo"), minibatches=1, max_new_tokens=8, weights={"right": 1.0, "brief": 0.25}
    )
    got = token_credit(built.advantage, built.shaping, batch).advantages
    assert got[batch.loss_mask].tolist() == pytest.approx(want, abs=1e-4), f"seed {seed}"
    alone = token_credit(built.advantage, replace(built.shaping, weights={"right": 1.0}), batch).advantages
    assert not torch.allclose(alone, got, atol=1e-3), "the second reward counts"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_compares_the_answers_to_which_it_applies(seed: int) -> None:
    """The others of a group have no share of it, as in TRL; an environment's own rewards are a further one."""
    rng, (right, groups, lengths) = random.Random(seed), _case(seed)
    own = [rng.random() < 0.2 for _ in right]
    brief = [math.nan if given or r < 0.5 else -rng.random() for r, given in zip(right, own, strict=True)]
    parts = [
        [math.nan if given else r for r, given in zip(right, own, strict=True)],
        brief,
        [r if given else math.nan for r, given in zip(right, own, strict=True)],
    ]
    whole, weights = [0.0] * len(right), (1.0, 0.25, 1.0)
    for part, weight in zip(parts, weights, strict=True):
        on = [i for i, value in enumerate(part) if not math.isnan(value)]
        case = [part[i] for i in on], [groups[i] for i in on], lengths
        for place, i in enumerate(on):
            whole[i] += weight * _grpo(case, place)
    want = [(x - statistics.fmean(whole)) / (statistics.stdev(whole) + 1e-6) for x in whole]
    total = [r if math.isnan(b) else r + 0.25 * b for r, b in zip(right, brief, strict=True)]
    chosen = AlgorithmConfig(kind="gdpo")
    built = build_algorithm(chosen, minibatches=1, max_new_tokens=8, weights={"right": 1.0, "brief": 0.25})
    batch = _batch(total, groups, {"brief": brief, "right": parts[0], "right/words": lengths})
    got = token_credit(built.advantage, built.shaping, batch).advantages
    assert got[batch.loss_mask].tolist() == pytest.approx(want, abs=1e-4), f"seed {seed}"


def test_a_users_sum_over_parts_that_all_answers_have_is_their_reward() -> None:
    weights = {"right": 1.0, "brief": 0.25}
    built = build_algorithm(AlgorithmConfig(kind="gdpo"), minibatches=1, max_new_tokens=8, weights=weights)
    summed = Advantage(of=lambda samples: samples.parts @ samples.weights)
    batch = _batch([1.05, 0.1, 1.0, 0.0], [0] * 4, {"right": [1.0, 0.0, 1.0, 0.0], "brief": [0.2, 0.4, 0.0, 0.0]})
    got = token_credit(summed, built.shaping, batch).advantages[batch.loss_mask]
    assert got.tolist() == pytest.approx([1.05, 0.1, 1.0, 0.0])


def test_a_cost_of_right_answers_alone_trains_none_of_them_below_a_wrong_one() -> None:
    weights = dict.fromkeys(("right", "brief", "none"), 1.0)
    built = build_algorithm(AlgorithmConfig(kind="gdpo"), minibatches=1, max_new_tokens=8, weights=weights)
    parts = {"brief": [-0.2, -0.8, math.nan, math.nan], "right": [1.0, 1.0, 0.0, 0.0], "none": [math.nan] * 4}
    batch = _batch([0.8, 0.2, 0.0, 0.0], [0] * 4, parts)
    got = token_credit(built.advantage, built.shaping, batch).advantages[batch.loss_mask]
    # sqrt(3)/2 of right, sqrt(1/2) of brief, over the four's standard deviation
    each = [3**0.5 / 2 + 0.5**0.5, 3**0.5 / 2 - 0.5**0.5, -(3**0.5) / 2, -(3**0.5) / 2]
    assert got.tolist() == pytest.approx([x / statistics.stdev(each) for x in each], abs=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("adds_up", [True, False])
def test_named_parts_of_the_only_reward_are_rewards_if_they_add_up_to_it(adds_up: bool, seed: int) -> None:
    """Else they are metrics, such as the turns of an environment."""
    rng, (rewards, groups, lengths) = random.Random(seed), _case(seed)
    other = [rng.choice([0.0, 2.0, rng.random()]) for _ in rewards]
    total = [a + b * adds_up for a, b in zip(rewards, other, strict=True)]
    each = [[_grpo((values, groups, lengths), i) for i in range(len(rewards))] for values in (rewards, other)]
    whole = [a + b * adds_up for a, b in zip(*each, strict=True)]
    want = [(x - statistics.fmean(whole)) / (statistics.stdev(whole) + 1e-6) for x in whole]
    batch = _batch(total, groups, {"right": rewards, "turns": other})
    built = build_algorithm(AlgorithmConfig(kind="gdpo"), minibatches=1, max_new_tokens=8)
    got = token_credit(built.advantage, built.shaping, batch).advantages
    assert got[batch.loss_mask].tolist() == pytest.approx(want, abs=1e-3), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_few_answers_lack_of_their_parts_is_one_more_part(seed: int) -> None:
    """A penalty without a name; a group without it keeps the parts of its answers, too."""
    rng, (right, groups, lengths) = random.Random(seed), _case(seed)
    brief = [rng.choice([0.0, 2.0, rng.random()]) for _ in right]
    lacks = [-0.5 * (groups[i] != groups[-1] and i % 3 == 0) for i in range(len(right))]
    assert any(lacks)
    parts = [[_grpo((values, groups, lengths), i) for i in range(len(right))] for values in (right, brief, lacks)]
    whole = [sum(values) for values in zip(*parts, strict=True)]
    want = [(x - statistics.fmean(whole)) / (statistics.stdev(whole) + 1e-6) for x in whole]
    total = [sum(values) for values in zip(right, brief, lacks, strict=True)]
    built = build_algorithm(AlgorithmConfig(kind="gdpo"), minibatches=1, max_new_tokens=8)
    batch = _batch(total, groups, {"right": right, "brief": brief})
    got = token_credit(built.advantage, built.shaping, batch).advantages
    assert got[batch.loss_mask].tolist() == pytest.approx(want, abs=1e-3), f"seed {seed}"


def test_metrics_that_add_up_by_chance_are_no_parts() -> None:
    """A solved task of one turn, and answers without reward and turns, which tell nothing."""
    rewards, turns, groups = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 4.0, 2.0, 5.0, 3.0] + 3 * [0.0], [0, 1] * 4
    built = build_algorithm(AlgorithmConfig(kind="gdpo"), minibatches=1, max_new_tokens=8)
    batch = _batch(rewards, groups, {"turns": turns})
    got = token_credit(built.advantage, built.shaping, batch).advantages
    case = rewards, groups, [1] * 8
    assert got[batch.loss_mask].tolist() == pytest.approx([_gdpo(case, i) for i in range(8)], abs=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_of_verdicts_are_no_parts(seed: int) -> None:
    """Of a `code` reward that most answers pass: 1 of 1 in these alone, and a share of failures is no reward."""
    rng, (_, groups, lengths) = random.Random(seed), _case(seed)
    shares = [(1.0, 0.0, 0.0) if rng.random() < 0.7 else rng.choice([(0, 1, 0), (0.5, 0.25, 0.25)]) for _ in groups]
    parts = dict(zip(("passed", "time", "wrong"), map(list, zip(*shares, strict=True)), strict=True))
    case = parts["passed"], groups, lengths
    built = build_algorithm(AlgorithmConfig(kind="gdpo"), minibatches=1, max_new_tokens=8)
    batch = _batch(parts["passed"], groups, parts)
    got = token_credit(built.advantage, built.shaping, batch).advantages
    want = [_gdpo(case, i) for i in range(len(groups))]
    assert got[batch.loss_mask].tolist() == pytest.approx(want, abs=1e-3), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lacks", [0.0, -0.5])
def test_parts_of_0_and_1_are_rewards_also_with_one_answer_that_lacks_something(lacks: float, seed: int) -> None:
    rng, groups = random.Random(seed), [i // 8 for i in range(64)]
    right, brief = ([float(rng.random() < 0.4) for _ in groups] for _ in range(2))
    right[5] = 1.0
    odd = [lacks if i == 5 else 0.0 for i in range(len(groups))]
    each = [[_grpo((values, groups, groups), i) for i in range(len(groups))] for values in (right, brief, odd)]
    whole = [sum(values) for values in zip(*each, strict=True)]
    want = [(x - statistics.fmean(whole)) / (statistics.stdev(whole) + 1e-6) for x in whole]
    total = [sum(values) for values in zip(right, brief, odd, strict=True)]
    built = build_algorithm(AlgorithmConfig(kind="gdpo"), minibatches=1, max_new_tokens=8)
    batch = _batch(total, groups, {"right": right, "brief": brief})
    got = token_credit(built.advantage, built.shaping, batch).advantages
    assert got[batch.loss_mask].tolist() == pytest.approx(want, abs=1e-3), f"seed {seed}"


def test_a_sample_of_several_sequences_is_found_once() -> None:
    ids = torch.tensor([7, 3, 7, 7, 5])
    first, index = find_samples(ids)
    assert first.tolist() == [1, 4, 0]
    assert index.tolist() == [2, 0, 2, 2, 1]
    assert sample_rewards(torch.tensor([0.5, 2.0, 0.5, 0.5, -1.0]), ids).tolist() == [2.0, -1.0, 0.5]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.95)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_equals_the_sum_of_its_definition(seed: int, gamma: float, lam: float) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(6)]
    rewards, values = ([[rng.gauss(0, 1) for _ in range(n)] for n in lengths] for _ in range(2))
    want = []
    for r, v in zip(rewards, values, strict=True):
        delta = [r[t] + gamma * ([*v, 0.0][t + 1]) - v[t] for t in range(len(r))]
        want += [sum((gamma * lam) ** k * delta[t + k] for k in range(len(r) - t)) for t in range(len(r))]
    flat_r, flat_v = (torch.tensor(list(chain(*x)), dtype=torch.float64) for x in (rewards, values))
    advantages, returns = gae(flat_r, flat_v, torch.tensor([0, *lengths]).cumsum(0), Discount(gamma=gamma, lam=lam))
    assert advantages.tolist() == pytest.approx(want)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(want, flat_v.tolist(), strict=True)])


@pytest.mark.parametrize("baselines", [None, torch.tensor([0.5, math.nan])])
def test_a_group_without_a_greedy_answer_has_no_advantage_to_it(baselines: torch.Tensor | None) -> None:
    samples = replace(_samples(([1.0, 0.0], [0, 1], [3, 3])), baselines=baselines)
    with pytest.raises(AlignmentError, match="no greedy answer"):
        ADVANTAGES["remax"].of(samples)


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_sums_to_the_end_equal_the_loop_at_any_length(seed: int, factor: float) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 2, 3, rng.randint(1, 900), 512, 513]) for _ in range(12)]
    rows = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
    wanted = []
    for row in rows:
        found, total = [], 0.0
        for value in reversed(row):
            total = value + factor * total
            found.append(total)
        wanted += reversed(found)
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    assert discounted_sums(flat, bounds, factor).tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12), f"seed {seed}"


def test_sums_to_the_end_make_few_passes_over_long_answers() -> None:
    """A loop over 16,384 tokens took several operations for each."""

    class Counting(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += 1
            return function(*args, **kwargs or {})

    with Counting() as counting:
        discounted_sums(torch.ones(4 * 16384, dtype=torch.float64), torch.arange(5) * 16384, 0.9)
    assert counting.operations < 1000


def test_sums_to_the_end_do_not_cross_sequences() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert discounted_sums(values, torch.tensor([0, 3, 3, 4, 5])).tolist() == [7.0, 6.0, 4.0, 8.0, 16.0]
    assert discounted_sums(values, torch.tensor([0, 5]), 0.5).tolist() == [5.0, 8.0, 12.0, 16.0, 16.0]

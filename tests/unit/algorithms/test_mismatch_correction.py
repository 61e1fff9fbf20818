"""The behaviour correction that is chosen by the mismatch of the step before."""

from __future__ import annotations

import math
import random

import pytest
import torch

from areal_lora.algorithms.losses import behaviour_weights, policy_loss
from areal_lora.algorithms.mismatch import choose
from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.types import Correction

NONE, TRUNCATE, MASK = Correction
AUTO = build_algorithm(
    AlgorithmConfig.model_validate({"kind": "grpo", "behaviour_correction": "auto", "behaviour_cap": 1.5}),
    minibatches=2,
    max_new_tokens=8,
)


@pytest.mark.parametrize(
    ("current", "mean", "chosen"),
    [
        (NONE, 0.0099, NONE),
        (NONE, 0.0101, TRUNCATE),
        (NONE, 0.099, TRUNCATE),
        (NONE, 0.101, MASK),
        (TRUNCATE, 0.0051, TRUNCATE),
        (TRUNCATE, 0.0049, NONE),
        (TRUNCATE, 0.099, TRUNCATE),
        (TRUNCATE, 0.101, MASK),
        (MASK, 0.0501, MASK),
        (MASK, 0.0499, TRUNCATE),
        (MASK, 0.0051, TRUNCATE),
        (MASK, 0.0049, NONE),
    ],
)
def test_a_correction_is_entered_above_its_limit_and_left_below_half_of_it(
    current: Correction, mean: float, chosen: Correction
) -> None:
    assert choose(current, mean) is chosen


@pytest.mark.parametrize("mean", [None, 0.0, math.nan, math.inf])
@pytest.mark.parametrize("current", Correction)
def test_without_a_measurement_nothing_changes(current: Correction, mean: float | None) -> None:
    assert choose(current, mean) is current


def test_each_limit_acts_alone_and_a_greater_mismatch_never_has_a_weaker_correction() -> None:
    """Oracle: a switch with two thresholds for each limit, independent of the other's."""
    draw = random.Random(3)
    state, cut, masked = TRUNCATE, True, False
    seen = set()
    for _ in range(5000):
        mean = 10 ** draw.uniform(-3, 0)
        cut = mean > 0.01 or (cut and mean > 0.005)
        masked = mean > 0.1 or (masked and mean > 0.05)
        assert choose(state, mean) <= choose(state, 1.5 * mean)
        before, state = state, choose(state, mean)
        seen.add((before, state))
        assert state is (MASK if masked else TRUNCATE if cut else NONE)
    assert len(seen) == 9


def test_a_mean_that_varies_by_less_than_half_does_not_alternate() -> None:
    for limit in (0.01, 0.1):
        first = choose(NONE, 1.01 * limit)
        state = first
        for factor in (0.7, 1.3, 0.51, 1.2, 0.9):
            state = choose(state, factor * limit)
            assert state is first


def oracle(chosen: Correction, gaps: list[list[float]]) -> list[float]:
    """Weights of tokens in float64, sequence by sequence."""
    found: list[float] = []
    for row in gaps:
        if chosen is NONE:
            found += [1.0] * len(row)
        elif chosen is TRUNCATE:
            found += [min(math.exp(gap), 1.5) for gap in row]
        else:
            found += [math.exp(gap) if 0.5 <= math.exp(gap) <= 1.5 else 0.0 for gap in row]
    return found


@pytest.mark.parametrize("chosen", Correction)
def test_each_choice_weighs_tokens_as_a_float64_loop_does(chosen: Correction) -> None:
    """In turn: small differences, an answer whose mean is 0.67, impossible tokens, both sides of both bounds."""
    gaps = [[0.02, -0.03, 0.016], [-0.4, -0.4], [-9.5, 3.1], [0.41, 0.4, -0.69, -0.7]]
    logprobs = torch.linspace(-1.0, -0.5, 11, dtype=torch.float64, requires_grad=True)
    prox = logprobs.detach().clone()
    advantages = torch.linspace(0.5, 1.5, 11, dtype=torch.float64)
    bounds = torch.tensor([0, *(len(row) for row in gaps)]).cumsum(0)
    algorithm = AUTO.with_correction(chosen)
    assert algorithm.correction is chosen
    policy_loss(
        algorithm.terms,
        logprobs=logprobs,
        prox_logprobs=prox,
        rollout_logprobs=prox - torch.tensor([gap for row in gaps for gap in row], dtype=torch.float64),
        advantages=advantages,
        weights=torch.ones(11, dtype=torch.float64),
        cu_seqlens=bounds,
        given=torch.zeros(4, dtype=torch.bool),
    ).loss.backward()
    assert logprobs.grad is not None
    weights = oracle(chosen, gaps)
    assert logprobs.grad.tolist() == pytest.approx(
        [-w * a for w, a in zip(weights, advantages.tolist(), strict=True)], rel=1e-9
    )
    assert (0.0 in weights) == (chosen is MASK)


@pytest.mark.parametrize("uncertain", [1.0, 0.5])
@pytest.mark.parametrize("noise", [0.2, 0.3, 0.4])
def test_the_mask_keeps_exactly_sampled_tokens_and_drops_outliers(noise: float, uncertain: float) -> None:
    """Sampled from a softmax, trained by one whose logits have noise: w has a mean of 1, its logarithm of -KL."""
    draw, (answers, length) = torch.Generator().manual_seed(0), (16, 1000)
    bounds = torch.arange(0, answers * length + 1, length)
    on = torch.ones(answers * length, dtype=torch.bool)
    logits = 2 * torch.randn(len(on), 32, generator=draw)
    logits[torch.rand(len(on), generator=draw) > uncertain, 0] += 25
    sampled = logits.log_softmax(-1)
    trained = (logits + noise * torch.randn(logits.shape, generator=draw)).log_softmax(-1)
    gap = (trained - sampled).gather(1, torch.multinomial(sampled.exp(), 1, generator=draw))[:, 0]
    mean = float(gap.abs().mean())
    assert 0.06 < mean < 0.3
    assert 0.98 < float(gap.exp().mean()) < 1.02, "sampled exactly"
    preset = AlgorithmConfig.model_validate({"kind": "grpo", "behaviour_correction": "auto"})
    auto = build_algorithm(preset, minibatches=1, max_new_tokens=8)
    behaviour, least = auto.with_correction(MASK).terms.behaviour, 0.9 if mean < 0.2 else 0.85
    assert float((behaviour_weights(behaviour, gap, on, bounds) > 0).float().mean()) > least
    for outlier in (-6.0, 6.0):
        gap[3::length] = outlier
        kept = behaviour_weights(behaviour, gap, on, bounds) > 0
        assert not bool(kept[3::length].any())
        assert float(kept.float().mean()) > least, "an outlier alone leaves the loss"


def test_recorded_numbers_of_corrections_keep_their_order() -> None:
    """Manifests and metrics of older runs have the number."""
    assert {each.name: each.value for each in Correction} == {"NONE": 0, "TRUNCATE": 1, "MASK": 2}


def test_a_fixed_correction_remains() -> None:
    fixed = build_algorithm(AlgorithmConfig(kind="mis"), minibatches=1, max_new_tokens=8)
    assert fixed.with_correction(MASK) is fixed
    assert fixed.correction is None

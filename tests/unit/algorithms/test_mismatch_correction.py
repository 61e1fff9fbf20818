"""The behaviour correction that is chosen by the mismatch of the step before."""

from __future__ import annotations

import math
import random

import pytest
import torch

from areal_lora.algorithms.losses import policy_loss
from areal_lora.algorithms.mismatch import choose
from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.types import Correction

NONE, TRUNCATE, GEOMETRIC = Correction
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
        (NONE, 0.101, GEOMETRIC),
        (TRUNCATE, 0.0051, TRUNCATE),
        (TRUNCATE, 0.0049, NONE),
        (TRUNCATE, 0.099, TRUNCATE),
        (TRUNCATE, 0.101, GEOMETRIC),
        (GEOMETRIC, 0.0501, GEOMETRIC),
        (GEOMETRIC, 0.0499, TRUNCATE),
        (GEOMETRIC, 0.0051, TRUNCATE),
        (GEOMETRIC, 0.0049, NONE),
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
        assert state is (GEOMETRIC if masked else TRUNCATE if cut else NONE)
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
            mean = math.exp(sum(row) / len(row))
            kept = 0.99 <= mean <= 1.01 and min(row) >= math.log(1e-4)
            found += [mean if kept else 0.0] * len(row)
    return found


@pytest.mark.parametrize("chosen", Correction)
def test_each_choice_weighs_tokens_as_a_float64_loop_does(chosen: Correction) -> None:
    """In turn: a small mean, one off the bounds, an impossible token with a mean within them, one above the cap."""
    gaps = [[0.02, -0.03, 0.016], [0.05, 0.04], [-9.5, 3.1, 3.2, 3.2], [0.9, -0.895]]
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
    assert (0.0 in weights) == (chosen is GEOMETRIC)


def test_a_fixed_correction_remains() -> None:
    fixed = build_algorithm(AlgorithmConfig(kind="mis"), minibatches=1, max_new_tokens=8)
    assert fixed.with_correction(GEOMETRIC) is fixed
    assert fixed.correction is None

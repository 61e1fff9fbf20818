"""Losses of clients against loops in float64, and their gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from areal_lora.algorithms.token_losses import Bounds, Targets, bounds_of, token_loss
from areal_lora.operations.protocol import Loss, LossSettings

SEED = 5
LENGTHS = (20, 1, 43)
N = sum(LENGTHS)
SETTINGS = (LossSettings(), LossSettings(clip_low=0.5, clip_high=1.5, beta=0.7))


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """l, q, A, w; some weights are 0. Ratios reach beyond all bounds."""
    print("seed", SEED)
    g = torch.Generator().manual_seed(SEED)
    logp, q = (-3 * torch.rand(N, generator=g, dtype=torch.float64) - 0.01 for _ in range(2))
    advantages = torch.randn(N, generator=g, dtype=torch.float64)
    weights = torch.rand(N, generator=g, dtype=torch.float64) * (torch.rand(N, generator=g) > 0.3)
    return logp, q, advantages, weights


def by_hand(loss: Loss, s: LossSettings, logp: float, q: float, a: float, fixed: float, gaps: list[float]) -> float:
    """What is maximised for one target. ``fixed``: the log-probability that a stopped gradient sees; ``gaps``: that
    minus q, of all targets of the sequence that count.
    """

    def clipped(r: float, low: float, high: float) -> float:
        return min(r * a, (low if r < low else high if r > high else r) * a)

    r = math.exp(logp - q)
    match loss:
        case Loss.CROSS_ENTROPY:
            return logp
        case Loss.IMPORTANCE_SAMPLING:
            return r * a
        case Loss.PPO:
            return clipped(r, s.clip_low or 0.8, s.clip_high or 1.2)
        case Loss.CISPO:
            low, high = s.clip_low or 0.0, s.clip_high or 4.0
            return max(low, min(high, math.exp(fixed - q))) * logp * a
        case Loss.DRO:
            return logp * a - (s.beta or 0.05) / 2 * (logp - q) ** 2
        case Loss.GSPO:
            ratio = math.exp(sum(gaps) / len(gaps)) * math.exp(logp) / math.exp(fixed)
            return clipped(ratio, s.clip_low or 0.9997, s.clip_high or 1.0004)
        case Loss.STABLE_REINFORCE:
            taper = 1.0 if a > 0 else min(1.0, math.prod(math.exp(gap) for gap in gaps))
            return taper * a * logp - (s.beta or 0.0) / 2 * (logp - q) ** 2


def total(loss: Loss, s: LossSettings, logp: Tensor, fixed: Tensor) -> float:
    _, q, a, w = data()
    found = 0.0
    for new, old, gain, weight, frozen in zip(*(x.split(LENGTHS) for x in (logp, q, a, w, fixed)), strict=True):
        rows = list(zip(new.tolist(), old.tolist(), gain.tolist(), weight.tolist(), frozen.tolist(), strict=True))
        gaps = [f_ - q_ for _, q_, _, w_, f_ in rows if w_]
        found -= sum(w_ * by_hand(loss, s, l_, q_, a_, f_, gaps) for l_, q_, a_, w_, f_ in rows if w_)
    return found


def loss_of(loss: Loss, s: LossSettings, logp: Tensor) -> Tensor:
    _, q, advantages, weights = data()
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    targets = Targets(logprobs=logp, sampled=q, advantages=advantages, weights=weights, cu_seqlens=cu_seqlens)
    return token_loss(loss, bounds_of(loss, s), targets)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("loss", Loss)
def test_sum_and_gradient(loss: Loss, settings: LossSettings) -> None:
    logp = data()[0].requires_grad_()
    found = loss_of(loss, settings, logp)
    assert found.item() == pytest.approx(total(loss, settings, logp.detach(), logp.detach()), abs=1e-10)
    found.backward()
    assert logp.grad is not None
    fixed, h = logp.detach(), 1e-6
    for i in range(N):
        up, down = fixed.clone(), fixed.clone()
        up[i] += h
        down[i] -= h
        slope = (total(loss, settings, up, fixed) - total(loss, settings, down, fixed)) / (2 * h)
        assert float(logp.grad[i]) == pytest.approx(slope, abs=2e-8), i


@pytest.mark.parametrize("loss", Loss)
def test_a_target_without_weight_does_not_count_whatever_it_is(loss: Loss) -> None:
    logp = torch.tensor([-1.0, -800.0, -2.0], requires_grad=True)
    targets = Targets(
        logprobs=logp,
        sampled=torch.tensor([-1.5, 900.0, -1.0]),
        advantages=torch.tensor([1.0, math.inf, -1.0]),
        weights=torch.tensor([1.0, 0.0, 0.5]),
        cu_seqlens=torch.tensor([0, 3]),
    )
    found = token_loss(loss, bounds_of(loss, LossSettings()), targets)
    found.backward()
    assert math.isfinite(found.item())
    assert logp.grad is not None
    assert logp.grad.isfinite().all()
    assert logp.grad[1] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", Loss)
def test_a_target_that_the_sampler_gave_no_chance_spoils_no_other(loss: Loss, advantage: float) -> None:
    """exp(l - q) is infinite in fp32 from 89 on, and the gradient of a bounded infinity is not a number."""
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    targets = Targets(
        logprobs=logp,
        sampled=torch.tensor([-1.5, -9999.0, -2.5]),
        advantages=torch.tensor([1.0, advantage, 1.0]),
        weights=torch.ones(3),
        cu_seqlens=torch.tensor([0, 1, 2, 3]),
    )
    found = token_loss(loss, bounds_of(loss, LossSettings()), targets)
    found.backward()
    assert math.isfinite(found.item())
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


def test_defaults() -> None:
    assert bounds_of(Loss.PPO, LossSettings()) == Bounds(low=0.8, high=1.2)
    assert bounds_of(Loss.CISPO, LossSettings(clip_high=3.0)) == Bounds(low=0.0, high=3.0)

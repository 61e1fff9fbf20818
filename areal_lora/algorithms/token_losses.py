"""Losses of clients: plain sums over targets, each times its weight, without any denominator.

Of a target, l is the log-probability by the policy in training, q that by the policy that sampled it, A its advantage,
w its weight and r = exp(l - q). What a function here returns, [t], is maximised; the loss is ``- sum w * value``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lora.operations.messages import Loss, LossSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Arrays [t]; only ``logprobs`` (l) has a gradient. ``sampled`` is q."""

    logprobs: Tensor
    sampled: Tensor
    advantages: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Settings of a loss: what is not set has the value of `DEFAULTS`."""

    low: float = 0.0
    high: float = 0.0
    beta: float = 0.0


DEFAULTS: Mapping[Loss, Bounds] = {
    Loss.CROSS_ENTROPY: Bounds(),
    Loss.IMPORTANCE_SAMPLING: Bounds(),
    Loss.PPO: Bounds(low=0.8, high=1.2),
    Loss.CISPO: Bounds(low=0.0, high=4.0),
    Loss.DRO: Bounds(beta=0.05),
}


def bounds_of(loss: Loss, settings: LossSettings) -> Bounds:
    usual = DEFAULTS[loss]
    return Bounds(
        low=usual.low if settings.clip_low is None else settings.clip_low,
        high=usual.high if settings.clip_high is None else settings.clip_high,
        beta=usual.beta if settings.beta is None else settings.beta,
    )


def cross_entropy(bounds: Bounds, t: Targets) -> Tensor:
    """``l``."""
    return t.logprobs


def importance_sampling(bounds: Bounds, t: Targets) -> Tensor:
    """``r A``: the policy gradient with the ratio as its weight; at q = l its gradient is ``A grad l``."""
    return torch.exp(t.logprobs - t.sampled) * t.advantages


def ppo(bounds: Bounds, t: Targets) -> Tensor:
    """``min(r A, clip(r, low, high) A)``: PPO (Schulman et al., arXiv 1707.06347), equation 7."""
    ratio = torch.exp(t.logprobs - t.sampled)
    return torch.minimum(ratio * t.advantages, ratio.clamp(bounds.low, bounds.high) * t.advantages)


def cispo(bounds: Bounds, t: Targets) -> Tensor:
    """``stop_gradient(clip(r, low, high)) A l``: CISPO (MiniMax-M1, arXiv 2506.13585), equations 4 and 5."""
    ratio = torch.exp(t.logprobs.detach() - t.sampled)
    return ratio.clamp(bounds.low, bounds.high) * t.advantages * t.logprobs


def dro(bounds: Bounds, t: Targets) -> Tensor:
    """``A l - beta / 2 (l - q)^2``: Direct Reward Optimisation (Richemond et al., arXiv 2405.19107), section 3.

    The policy part of its quadratic loss, with a given advantage in place of reward minus value.
    """
    return t.advantages * t.logprobs - bounds.beta / 2 * (t.logprobs - t.sampled).square()


VALUES: Mapping[Loss, Callable[[Bounds, Targets], Tensor]] = {
    Loss.CROSS_ENTROPY: cross_entropy,
    Loss.IMPORTANCE_SAMPLING: importance_sampling,
    Loss.PPO: ppo,
    Loss.CISPO: cispo,
    Loss.DRO: dro,
}


def token_loss(loss: Loss, bounds: Bounds, targets: Targets, weights: Tensor) -> Tensor:
    """``- sum w * value`` over the targets with a weight; others do not count, whatever they are."""
    on = weights != 0

    def counted(values: Tensor) -> Tensor:
        return torch.where(on, values, 0.0)

    seen = Targets(
        logprobs=counted(targets.logprobs), sampled=counted(targets.sampled), advantages=counted(targets.advantages)
    )
    return -(weights * VALUES[loss](bounds, seen)).sum()

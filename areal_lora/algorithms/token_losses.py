"""Losses of clients: plain sums over targets, each times its weight, without any denominator.

Of a target, l is the log-probability by the policy in training, q that by the policy that sampled it, A its advantage,
w its weight and r = exp(l - q), which `ratio_of` keeps finite. What a function here returns, [t], is maximised; the
loss is ``- sum w * value``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal_lora.algorithms.losses import ratio_of, sequence_sums, spread
from areal_lora.operations.protocol import Loss, LossSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Arrays [t]; only ``logprobs`` (l) has a gradient. ``sampled`` is q. A target with weight 0 does not count."""

    logprobs: Tensor
    sampled: Tensor
    advantages: Tensor
    weights: Tensor
    cu_seqlens: Tensor  # [n + 1]


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
    Loss.GSPO: Bounds(low=1 - 3e-4, high=1 + 4e-4),
    Loss.STABLE_REINFORCE: Bounds(),
}


def bounds_of(loss: Loss, settings: LossSettings) -> Bounds:
    chosen = {"low": settings.clip_low, "high": settings.clip_high, "beta": settings.beta}
    return replace(DEFAULTS[loss], **{name: value for name, value in chosen.items() if value is not None})


def cross_entropy(bounds: Bounds, t: Targets) -> Tensor:
    """``l``."""
    return t.logprobs


def importance_sampling(bounds: Bounds, t: Targets) -> Tensor:
    """``r A``: the policy gradient with the ratio as its weight; at q = l its gradient is ``A grad l``."""
    return ratio_of(t.logprobs - t.sampled) * t.advantages


def ppo(bounds: Bounds, t: Targets) -> Tensor:
    """``min(r A, clip(r, low, high) A)``: PPO (Schulman et al., arXiv 1707.06347), equation 7."""
    ratio = ratio_of(t.logprobs - t.sampled)
    return torch.minimum(ratio * t.advantages, ratio.clamp(bounds.low, bounds.high) * t.advantages)


def cispo(bounds: Bounds, t: Targets) -> Tensor:
    """``stop_gradient(clip(r, low, high)) A l``: CISPO (MiniMax-M1, arXiv 2506.13585), equations 4 and 5."""
    ratio = ratio_of(t.logprobs.detach() - t.sampled)
    return ratio.clamp(bounds.low, bounds.high) * t.advantages * t.logprobs


def dro(bounds: Bounds, t: Targets) -> Tensor:
    """``A l - beta / 2 (l - q)^2``: Direct Reward Optimisation (Richemond et al., arXiv 2405.19107), section 3.

    The policy part of its quadratic loss, with a given advantage in place of reward minus value.
    """
    return t.advantages * t.logprobs - bounds.beta / 2 * (t.logprobs - t.sampled).square()


def gspo(bounds: Bounds, t: Targets) -> Tensor:
    """`ppo` with ``sg(s) p / sg(p)`` for r: GSPO-token (Zheng et al., arXiv 2507.18071), equations 13 and 14.

    p = exp(l), sg stops the gradient, and s is the geometric mean of r over the targets of the sequence that count.
    The default bounds are those of section 5.1.
    """
    frozen = t.logprobs.detach()
    counts = sequence_sums((t.weights != 0).to(frozen.dtype), t.cu_seqlens).clamp_min(1.0)
    mean = sequence_sums(frozen - t.sampled, t.cu_seqlens) / counts
    ratio = ratio_of(spread(mean, t.cu_seqlens, len(frozen))) * torch.exp(t.logprobs - frozen)
    return torch.minimum(ratio * t.advantages, ratio.clamp(bounds.low, bounds.high) * t.advantages)


def stable_reinforce(bounds: Bounds, t: Targets) -> Tensor:
    """``s A l - beta / 2 (l - q)^2`` with s = 1 where A > 0, else ``min(R, 1)``; no gradient through s.

    R is the product of r over the targets of the sequence that count. With beta 0, the default, it is TOPR: "Tapered
    Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs" (Le Roux et al., arXiv 2503.14286).
    The SDK's documentation names the loss, a REINFORCE that remains stable off policy, and its coefficient
    (``kl_coeff``, our beta), but no formula. ``(l - q)^2 / 2`` is the estimator k2 of the KL divergence from the
    sampler (Schulman, "Approximating KL divergence", 2020).
    """
    sums = sequence_sums(t.logprobs.detach() - t.sampled, t.cu_seqlens)
    gaps = spread(sums, t.cu_seqlens, len(t.weights))
    taper = torch.where(t.advantages > 0, 1.0, gaps.clamp_max(0.0).exp())
    return taper * t.advantages * t.logprobs - bounds.beta / 2 * (t.logprobs - t.sampled).square()


VALUES: Mapping[Loss, Callable[[Bounds, Targets], Tensor]] = {
    Loss.CROSS_ENTROPY: cross_entropy,
    Loss.IMPORTANCE_SAMPLING: importance_sampling,
    Loss.PPO: ppo,
    Loss.CISPO: cispo,
    Loss.DRO: dro,
    Loss.GSPO: gspo,
    Loss.STABLE_REINFORCE: stable_reinforce,
}


def token_loss(loss: Loss, bounds: Bounds, targets: Targets) -> Tensor:
    """``- sum w * value`` over the targets with a weight; others do not count, whatever they are."""
    on = targets.weights != 0

    counted = {name: torch.where(on, getattr(targets, name), 0.0) for name in ("logprobs", "sampled", "advantages")}
    seen = replace(targets, **counted)
    return -(targets.weights * VALUES[loss](bounds, seen)).sum()

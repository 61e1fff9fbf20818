"""Policy losses as plain sums over tokens: denominators belong to the optimizer step.

A loss function sees the current log-probabilities of one micro-batch and returns sums, so
that micro-batches, data-parallel ranks and adapters can be added up in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lora.algorithms.kl import k3, ratio_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """Numbers of the decoupled PPO objective that do not change during a run."""

    eps_clip: float
    eps_clip_high: float
    behaviour_cap: float
    kl_coef: float
    entropy_coef: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySums:
    """Sums over the tokens of a micro-batch. ``loss`` carries the gradient."""

    loss: Tensor  # []
    stats: dict[str, Tensor]  # each []


def decoupled_ppo(
    terms: PolicyTerms,
    *,
    logprobs: Tensor,  # [t] current policy, with gradient
    prox_logprobs: Tensor | None,  # [t] policy at the start of the step; None: it is the current one
    rollout_logprobs: Tensor,  # [t] behaviour policy
    advantages: Tensor,  # [t]
    weights: Tensor,  # [t] 0 off the loss mask
    ref_logprobs: Tensor | None = None,  # [t]
    entropy: Tensor | None = None,  # [t] with gradient
) -> PolicySums:
    """Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298 equation 5).

    ``- sum w * min(r A, clip(r, 1 - eps, 1 + eps_high) A)`` where ``r`` is current over
    proximal and ``w`` is proximal over behaviour, a constant. Tokens with ``w`` above
    ``behaviour_cap`` leave the loss: their behaviour policy is too far away to correct for.
    """
    on = weights > 0
    prox = logprobs.detach() if prox_logprobs is None else prox_logprobs
    gap = torch.where(on, prox - rollout_logprobs, torch.zeros_like(prox))
    behaviour = ratio_of(gap)
    kept = on & (behaviour <= terms.behaviour_cap)
    weight = torch.where(kept, weights * behaviour, torch.zeros_like(weights))
    # Masked tokens may hold anything, infinities included: they are replaced before exp, not after.
    log_ratio = torch.where(kept, logprobs - prox, torch.zeros_like(prox))
    ratio = ratio_of(log_ratio)
    clipped = ratio.clamp(1.0 - terms.eps_clip, 1.0 + terms.eps_clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weight * objective).sum()
    stats = {
        "policy_loss": loss.detach(),
        "tokens": on.sum().float(),
        "clipped": (kept & (clipped * advantages < ratio * advantages)).sum().float(),
        "capped": (on & ~kept).sum().float(),
        "behaviour_abs": gap.abs().sum(),
    }
    if ref_logprobs is not None:
        zeros = torch.zeros_like(prox)
        kl = k3(torch.where(on, logprobs, zeros), torch.where(on, ref_logprobs, zeros))  # 0 where both are
        loss = loss + terms.kl_coef * (weights * kl).sum()
        stats["kl"] = kl.detach().sum()
    if entropy is not None:
        bonus = torch.where(on, entropy, torch.zeros_like(entropy))
        loss = loss - terms.entropy_coef * (weights * bonus).sum()
        stats["entropy"] = bonus.detach().sum()
    return PolicySums(loss=loss, stats=stats)

"""Policy losses as plain sums over tokens: denominators belong to the optimizer step.

A loss function sees the current log-probabilities of one micro-batch and returns sums, so
that micro-batches, data-parallel ranks and adapters can be added up in any order. All losses share one form::

    - sum over tokens of  weight * w * objective      w = proximal / behaviour, a constant

and differ in the objective: one function each in `LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal_lora.algorithms.kl import Estimator, ratio_of
from areal_lora.algorithms.reduce import sequence_sums, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Bounds of a ratio. ``dual`` bounds the objective of a negative advantage; None: it has no bound."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A micro-batch as an objective sees it: finite everywhere, 0 off the mask.

    ``old`` is the policy in the denominator of the ratio. Every array is [t]; only ``logprobs`` has a gradient.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    on: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is maximised for each token, [t], and the tokens whose gradient the clip removed or bounded, [t] bool."""

    value: Tensor
    clipped: Tensor


def ppo(clip: Clip, tokens: Tokens) -> Objective:
    """``min(r A, clip(r, 1 - low, 1 + high) A)``: PPO (Schulman et al., arXiv 1707.06347), equation 7.

    Two bounds: clip-higher, DAPO (arXiv 2503.14476), equation 10. With ``dual``: ``max(..., dual A)`` where A < 0,
    dual-clip PPO (Ye et al., arXiv 1912.09729), equation 5.
    """
    return _clipped(clip, ratio_of(tokens.logprobs - tokens.old), tokens.advantages)


def gspo(clip: Clip, tokens: Tokens) -> Objective:
    """`ppo` with one ratio per sequence, the geometric mean over its tokens: GSPO (arXiv 2507.18071), equations 5, 7.

    Each token gets its sequence's objective; the reduction ``sequence`` counts it once.
    """
    gaps = sequence_sums(tokens.logprobs - tokens.old, tokens.cu_seqlens)
    counts = sequence_sums(tokens.on.to(gaps.dtype), tokens.cu_seqlens).clamp_min(1.0)
    return _clipped(clip, spread(ratio_of(gaps / counts), tokens.cu_seqlens), tokens.advantages)


def _clipped(clip: Clip, ratio: Tensor, advantages: Tensor) -> Objective:
    free, bounded = ratio * advantages, ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    value, clipped = torch.minimum(free, bounded), bounded < free
    if clip.dual is not None:
        floor = clip.dual * advantages
        below = (advantages < 0) & (value < floor)
        value, clipped = torch.where(below, floor, value), clipped | below
    return Objective(value=value, clipped=clipped)


def cispo(clip: Clip, tokens: Tokens) -> Objective:
    """``sg(clip(r, 1 - low, 1 + high)) A log p``: CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.

    sg stops the gradient: a clipped token keeps one, with a bounded weight.
    """
    ratio = ratio_of((tokens.logprobs - tokens.old).detach())
    bounded = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return Objective(value=bounded * tokens.advantages * tokens.logprobs, clipped=bounded != ratio)


def reinforce(clip: Clip, tokens: Tokens) -> Objective:
    """``A log p``: REINFORCE (Williams 1992), as in GPG (arXiv 2504.02546) and OPO (arXiv 2505.23585)."""
    return Objective(value=tokens.advantages * tokens.logprobs, clipped=torch.zeros_like(tokens.on))


Loss = Callable[[Clip, Tokens], Objective]
LOSSES: Mapping[str, Loss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How a token's weight ``w = proximal / behaviour`` enters the loss; see `behaviour_weights`."""

    correction: Literal["mask", "truncate", "none"]
    level: Literal["token", "sequence"]
    cap: float
    floor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """The parts of an objective that do not change during a run. ``ratio`` names the policy in its denominator."""

    loss: Loss
    clip: Clip
    ratio: Literal["proximal", "rollout"]
    behaviour: Behaviour
    kl: Estimator
    kl_coef: float
    entropy_coef: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Sums over the tokens of a micro-batch. ``loss`` carries the gradient."""

    loss: Tensor  # []
    stats: dict[str, Tensor]  # each []


def behaviour_weights(behaviour: Behaviour, gap: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weights [t] from ``gap`` = log proximal - log behaviour [t], which is 0 off the mask.

    Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5) with ``w = exp(gap)``, or
    the product over the sequence. ``truncate``: ``min(w, cap)``, TIS (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"). ``mask``: w within [floor, cap], else 0: MIS (Liu et al. 2025, "When
    speed kills stability"); with a floor IcePop (Ling team, arXiv 2510.18855).
    """
    if behaviour.correction == "none":
        return torch.ones_like(gap)
    if behaviour.level == "sequence":
        gap = spread(sequence_sums(gap, cu_seqlens), cu_seqlens)
    weight = ratio_of(gap)
    if behaviour.correction == "truncate":
        return weight.clamp_max(behaviour.cap)
    within = (weight <= behaviour.cap) & (weight >= behaviour.floor)
    return torch.where(within, weight, torch.zeros_like(weight))


def policy_loss(
    terms: PolicyTerms,
    *,
    logprobs: Tensor,  # [t] current policy, with gradient
    prox_logprobs: Tensor | None,  # [t] policy at the start of the step, without dropout; None: ``logprobs``
    rollout_logprobs: Tensor,  # [t] behaviour policy
    advantages: Tensor,  # [t]
    weights: Tensor,  # [t] 0 off the loss mask
    cu_seqlens: Tensor,  # [n + 1] of whole sequences
    given: Tensor,  # [n] bool, given answers
    ref_logprobs: Tensor | None = None,  # [t]
    entropy: Tensor | None = None,  # [t] with gradient
    unmoved: bool = False,  # no optimizer step has been taken since the proximal log-probabilities were computed
) -> LossTerms:
    """Sum the loss of one micro-batch.

    Tokens with ``w = 0`` leave the loss: their behaviour policy is too far away to correct for. KL divergence and
    entropy count for all sampled tokens of the mask. A token of a given answer adds its negative log-probability
    (cross-entropy): no ratio, no weight w. The ratio of an ``unmoved`` policy to the proximal one is 1, whatever its
    dropout; w never depends on dropout.
    """
    on = weights > 0
    imitated = spread(given, cu_seqlens)
    zeros = torch.zeros_like(weights)
    # Masked tokens may hold anything, infinities included: they are replaced before exp, not after.
    current = torch.where(on, logprobs, zeros)
    rollout = torch.where(on, rollout_logprobs, zeros)
    prox = current.detach() if prox_logprobs is None else torch.where(on, prox_logprobs, zeros)
    old = rollout if terms.ratio == "rollout" else current.detach() if unmoved else prox
    gap = torch.where(imitated, zeros, prox - rollout)
    behaviour = torch.where(imitated, torch.ones_like(gap), behaviour_weights(terms.behaviour, gap, cu_seqlens))
    kept = on & (behaviour > 0)
    objective = terms.loss(
        terms.clip, Tokens(logprobs=current, old=old, advantages=advantages, on=on, cu_seqlens=cu_seqlens)
    )
    value = torch.where(imitated, current, objective.value)
    loss = -(torch.where(kept, weights * behaviour, zeros) * value).sum()
    stats = {
        "policy_loss": loss.detach(),
        "tokens": on.sum().float(),
        "sampled_tokens": (on & ~imitated).sum().float(),
        "clipped": (kept & objective.clipped & ~imitated).sum().float(),
        "capped": (on & ~kept).sum().float(),
        "behaviour_abs": gap.abs().sum(),
    }
    sampled = torch.where(imitated, zeros, weights)
    if ref_logprobs is not None:
        kl = terms.kl(current, torch.where(on, ref_logprobs, zeros))  # 0 where both are
        if terms.kl_coef:
            loss = loss + terms.kl_coef * (sampled * kl).sum()
        stats["kl"] = torch.where(imitated, zeros, kl.detach()).sum()
    if entropy is not None:
        bonus = torch.where(on, entropy, zeros)
        loss = loss - terms.entropy_coef * (sampled * bonus).sum()
        stats["entropy"] = bonus.detach().sum()
    return LossTerms(loss=loss, stats=stats)


def value_loss(
    clip: float | None,
    *,
    values: Tensor,  # [t] current critic, with gradient
    before: Tensor,  # [t] critic at the start of the step
    returns: Tensor,  # [t]
    weights: Tensor,  # [t] 0 off the loss mask
) -> LossTerms:
    """Sum ``w max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`` of one micro-batch.

    Without ``clip``: ``w (V - R)^2 / 2``. The squared error of PPO (Schulman et al., arXiv 1707.06347, equation 9),
    clipped as in its authors' implementation (Engstrom et al., arXiv 2005.12729, section 3).
    """
    on = weights > 0
    zeros = torch.zeros_like(weights)
    current, old, target = (torch.where(on, x, zeros) for x in (values, before, returns))
    error = (current - target).square()
    clipped = torch.zeros_like(on)
    if clip is not None:
        bounded = (old + (current - old).clamp(-clip, clip) - target).square()
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    loss = 0.5 * (weights * error).sum()
    stats = {"value_loss": loss.detach(), "value_clipped": clipped.sum().float(), "value_tokens": on.sum().float()}
    return LossTerms(loss=loss, stats=stats)

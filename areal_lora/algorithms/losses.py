"""Policy losses as plain sums over tokens, and KL estimators. Denominators belong to the optimizer step.

A loss function sees the current log-probabilities of one micro-batch and returns sums, so that micro-batches,
data-parallel ranks and adapters can be added up in any order. All losses share one form::

    - sum over tokens of  weight * w * objective      w = proximal / behaviour, a constant

and differ in the objective: one function each in `LOSSES`. KL(current || reference) is estimated per token from samples
of the current policy with Schulman's estimators, ``d = reference - current``; source:
http://joschu.net/blog/kl-approx.html.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Reduction = Literal["token", "sequence", "constant"]


def token_weights(loss_mask: Tensor, cu_seqlens: Tensor, reduction: Reduction) -> Tensor:
    """Weights [T] fp32: 1 on the mask, or 1 / (masked tokens of the sequence) for ``sequence``."""
    mask = loss_mask.float()
    if reduction != "sequence":
        return mask
    counts = sequence_sums(mask, cu_seqlens)
    return mask / spread(counts.clamp_min(1.0), cu_seqlens, len(mask))


def denominator(trained: Tensor, cu_seqlens: Tensor, reduction: Reduction, max_new_tokens: int) -> float:
    """Divisor of the summed loss of a whole minibatch (over all data-parallel ranks); sequences without tokens on the
    mask ``trained`` [T] do not count.
    """
    counts = token_counts(trained, cu_seqlens)
    n = max(int((counts if reduction == "token" else counts > 0).sum()), 1)
    return float(n * max_new_tokens if reduction == "constant" else n)


def gradient_scale(loss_mask: Tensor, cu_seqlens: Tensor, reduction: Reduction) -> float:
    """Factor of loss and `denominator` of a whole minibatch: a power of two, 1 unless weights are 1 / length.

    A gradient of 1 / 32768 has few bits in float16, and one of 32768 may overflow further down. So the factor is midway
    between shortest and longest length. The quotient has the same bits in fp32 and bf16 as without it.
    """
    if reduction != "sequence":
        return 1.0
    lengths = [n for n in token_counts(loss_mask, cu_seqlens).tolist() if n] or [1]
    return 2.0 ** round(math.log2(min(lengths) * max(lengths)) / 2)


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum packed [T] ``values`` over each of the N sequences. [N]"""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    numbers = torch.arange(lengths.numel(), device=values.device)
    index = numbers.repeat_interleave(lengths, output_size=len(values))  # [T]
    return torch.zeros(lengths.numel(), dtype=values.dtype, device=values.device).index_add(0, index, values)


def token_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many tokens of each of the N sequences are on the ``mask`` [T]. [N] int64, exact, in 5 bytes a token."""
    return functional.pad(mask, (1, 0)).cumsum(0, dtype=torch.int32)[cu_seqlens].diff().long()


def spread(per_sequence: Tensor, cu_seqlens: Tensor, n_tokens: int | None = None) -> Tensor:
    """Give each of [N] values to the tokens of its sequence. [T]. Without their number a GPU is waited for."""
    return per_sequence.repeat_interleave(cu_seqlens[1:] - cu_seqlens[:-1], output_size=n_tokens)


GAIN, MOST_ERROR = 0.1, 0.2
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # of `sapo`
VETO = 1e-4  # ratio of a token that no sampler of this policy would have chosen
LARGEST = 20.0  # a ratio of 5e8: beyond it the policies have nothing in common
MOST_WEIGHT = 20.0  # of a token in `dppo` and `kpop`: DPPO (arXiv 2602.04879), section 5.4

Estimator = Callable[[Tensor, Tensor], Tensor]
"""``estimator(logprobs [t], ref_logprobs [t]) -> [t]``."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``-d``: unbiased, may be negative. As a loss it has a gradient of mean zero, so it belongs into the reward."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``d^2 / 2``: never negative, biased; as a loss its gradient is that of the KL divergence on policy."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``exp(d) - 1 - d``: never negative, unbiased."""
    difference = ref_logprobs - logprobs
    return ratio_of(difference) - 1.0 - difference


ESTIMATORS: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


def adapted(scale: float, kl: float | None, target: float | None) -> float:
    """The factor of the KL coefficient after a step with mean divergence ``kl`` of a token.

    ``scale (1 + 0.1 clip(kl / target - 1, -0.2, 0.2))``: Ziegler et al., arXiv 1909.08593, section 2.2. Unchanged
    without a target, and where nothing was measured (None, 0 or not finite).
    """
    if target is None or not kl or not math.isfinite(kl):
        return scale
    return scale * (1.0 + GAIN * min(max(kl / target - 1.0, -MOST_ERROR), MOST_ERROR))


def ratio_of(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, continued along its tangent above ``LARGEST``: value and gradient stay finite.

    ``exp(89)`` is infinite in fp32. A clamp would be finite too, but its gradient is 0 where the policies are
    furthest apart. Tokens that are not trained on must be replaced before, not after: 0 times infinity is NaN.
    """
    beyond = (log_ratio - LARGEST).clamp_min(0.0)
    return log_ratio.clamp_max(LARGEST).exp() * (1.0 + beyond)


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
    ratio = spread(ratio_of(gaps / counts), tokens.cu_seqlens, len(tokens.on))
    return _clipped(clip, ratio, tokens.advantages)


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


def sapo(clip: Clip, tokens: Tokens) -> Objective:
    """``4 / tau sigmoid(tau (r - 1)) A``, tau by the sign of A: SAPO (Gao et al., arXiv 2511.20347), equation 6.

    A gate in place of a clip: its gradient is that of ``r A`` at r = 1, and falls to 0 away from there. tau has the
    paper's values; the bounds of ``clip`` only count the tokens that are far away.
    """
    ratio = ratio_of(tokens.logprobs - tokens.old)
    tau = torch.where(tokens.advantages > 0, TAU_POSITIVE, TAU_NEGATIVE)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return Objective(value=gate * tokens.advantages, clipped=(ratio < 1.0 - clip.low) | (ratio > 1.0 + clip.high))


def dppo(clip: Clip, tokens: Tokens) -> Objective:
    """``sg(min(r, 20)) A log p``, 0 where p moved from p_old by more than a bound, in A's direction.

    DPPO with the binary total variation |p - p_old| (arXiv 2602.04879). A ratio bounds rare tokens tightly and likely
    ones hardly; the difference of probabilities does neither. ``low`` is its bound for a fall, ``high`` for a rise.
    """
    moved = (tokens.logprobs.exp() - tokens.old.exp()).detach()
    return _within(torch.where(tokens.advantages > 0, moved <= clip.high, moved >= -clip.low), tokens)


def kpop(clip: Clip, tokens: Tokens) -> Objective:
    """``sg(min(r, 20)) A log p``, 0 where the binary KL divergence of p and p_old exceeds a bound.

    KPop (Guo et al., ringtech.notion.site/kpop), beside its authors' IcePop (arXiv 2510.18855). Two events: this token,
    any other. The ratio's band is wide for a rare token. ``high`` bounds KL(p || p_old), ``low`` KL(p_old || p).
    """
    p, old = (each.detach().exp().clamp(1e-6, 1 - 1e-6) for each in (tokens.logprobs, tokens.old))
    return _within((_binary_kl(p, old) <= clip.high) & (_binary_kl(old, p) <= clip.low), tokens)


def _within(trusted: Tensor, tokens: Tokens) -> Objective:
    """A bound of probabilities admits any ratio of a rare token, so that one could outweigh a batch."""
    ratio = ratio_of((tokens.logprobs - tokens.old).detach())
    weight = torch.where(trusted, ratio.clamp_max(MOST_WEIGHT), 0.0)
    return Objective(value=weight * tokens.advantages * tokens.logprobs, clipped=weight != ratio)


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).log()


Loss = Callable[[Clip, Tokens], Objective]
# fmt: off
LOSSES: Mapping[str, Loss] = {
    "ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce, "sapo": sapo, "dppo": dppo, "kpop": kpop,
}
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How a token's weight ``w = proximal / behaviour`` enters the loss; see `behaviour_weights`."""

    correction: Literal["mask", "truncate", "none"]
    level: Literal["token", "sequence", "geometric"]
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


def behaviour_weights(behaviour: Behaviour, gap: Tensor, on: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weights [t] from ``gap`` = log proximal - log behaviour [t], which is 0 off the mask ``on``.

    Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5) with ``w = exp(gap)``, or
    the product over the sequence, or its geometric mean. A product leaves any bounds as answers grow longer, the mean
    does not; with it a sequence with a token of ``exp(gap)`` below `VETO` has w = 0. ``truncate``: ``min(w, cap)``,
    TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). ``mask``: w within
    [floor, cap], else 0: MIS (Liu et al. 2025, "When speed kills stability"); with a floor IcePop (Ling team, arXiv
    2510.18855).
    """
    if behaviour.correction == "none":
        return torch.ones_like(gap)
    vetoed = torch.zeros_like(gap)
    if behaviour.level != "token":
        sums, counts = sequence_sums(gap, cu_seqlens), 1.0
        if behaviour.level == "geometric":
            counts = sequence_sums(on.to(gap.dtype), cu_seqlens).clamp_min(1.0)
            vetoed = spread(sequence_sums((gap < math.log(VETO)).to(gap.dtype), cu_seqlens), cu_seqlens, len(on))
        gap = spread(sums / counts, cu_seqlens, len(on))
    weight = torch.where(vetoed > 0, 0.0, ratio_of(gap))
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
    weights: Tensor,  # [t] 0 off the mask of trained tokens
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
    imitated = spread(given, cu_seqlens, len(weights))
    zeros = torch.zeros_like(weights)
    # Masked tokens may hold anything, infinities included: they are replaced before exp, not after.
    advantages, current = torch.where(on, advantages, zeros), torch.where(on, logprobs, zeros)
    rollout = torch.where(on, rollout_logprobs, zeros)
    prox = current.detach() if prox_logprobs is None else torch.where(on, prox_logprobs, zeros)
    old = rollout if terms.ratio == "rollout" else current.detach() if unmoved else prox
    gap = torch.where(imitated, zeros, prox - rollout)
    behaviour = torch.where(imitated, torch.ones_like(gap), behaviour_weights(terms.behaviour, gap, on, cu_seqlens))
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
        "ratio_abs": torch.where(kept & ~imitated, (current.detach() - old).abs(), zeros).sum(),
        "behaviour_abs": gap.abs().sum(),
    }
    sampled = torch.where(imitated, zeros, weights)
    if ref_logprobs is not None:
        # Without a part in the loss it is taken off reward or advantage: that of the policy that sampled.
        kl = terms.kl(current if terms.kl_coef else rollout, torch.where(on, ref_logprobs, zeros))  # 0 where both are
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
    stats = {
        "value_loss": 0.5 * error.detach().sum(),  # each token once, whatever the weights
        "value_clipped": clipped.sum().float(),
        "value_tokens": on.sum().float(),
    }
    return LossTerms(loss=0.5 * (weights * error).sum(), stats=stats)

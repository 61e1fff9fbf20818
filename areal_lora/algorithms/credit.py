"""From the rewards of a batch to the advantage of every trained token.

::

    reward -> length penalty -> KL divergence -> advantage of the sample -> its tokens           -> normalised
                                                 reward of the last token -> values of a critic -> normalised

All steps see the whole batch, on every rank the same one, so the result depends neither on data-parallel ranks nor on
micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lora.algorithms.advantages import EPS, Advantage, Discount, Samples, discounted_sums, find_samples, gae
from areal_lora.algorithms.kl import Estimator
from areal_lora.algorithms.reduce import sequence_sums, spread
from areal_lora.types import TrainBatch

UNDISCOUNTED = Discount(gamma=1.0, lam=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is taken off a reward before advantages are computed.

    ``kl_coef`` is 0 where the reward holds no KL divergence. An answer of more than ``overlong_from`` tokens loses a
    part of ``overlong_penalty``, one of ``max_new_tokens`` all of it. ``discount`` is for a critic's values.
    """

    kl: Estimator
    kl_coef: float
    overlong_from: float
    overlong_penalty: float
    max_new_tokens: int
    discount: Discount = UNDISCOUNTED


def overlong_penalty(lengths: Tensor, shaping: Shaping) -> Tensor:
    """Soft overlong punishment, DAPO (Yu et al., arXiv 2503.14476), equation 13: what an answer loses. [S] >= 0.

    Equation 13 has ``L_max`` = ``max_new_tokens`` and ``L_cache`` = ``max_new_tokens - overlong_from``.
    """
    buffer = shaping.max_new_tokens - shaping.overlong_from
    if buffer <= 0:
        return torch.zeros_like(lengths, dtype=torch.float64)
    beyond = (lengths.double() - shaping.overlong_from) / buffer
    return shaping.overlong_penalty * beyond.clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """``advantages`` of a batch's tokens, and with a critic what its values should have been; 0 off the mask."""

    advantages: Tensor  # [T] fp32
    returns: Tensor | None = None  # [T] fp32


def token_credit(advantage: Advantage, shaping: Shaping, batch: TrainBatch) -> Credit:
    """Advantages of every trained token, and returns for a critic.

    A KL divergence in the reward is that of the policy that sampled the token from the reference. It is taken off
    the sample's reward, or, for a ``whitened`` advantage, off each token as the sum from the token to the end. With a
    critic it is a cost of the token itself. Given answers have no credit, and are not compared with sampled ones.
    """
    mask, cu_seqlens = batch.loss_mask & ~spread(batch.given, batch.cu_seqlens), batch.cu_seqlens
    first, sample = find_samples(batch.sample_ids)

    def per_sample(values: Tensor) -> Tensor:
        sums = values.new_zeros(first.numel())
        return sums.index_add_(0, sample, sequence_sums(values, cu_seqlens))

    lengths = per_sample(mask.double())
    rewards = batch.rewards.double()[first] - overlong_penalty(lengths, shaping)
    kl = _kl_cost(shaping, batch, mask)
    if not (advantage.whitened or advantage.critic):
        rewards = rewards - per_sample(kl)
    sampled = ~batch.given[first]
    per_sequence = torch.zeros_like(rewards)
    if bool(sampled.any()):
        compared = Samples(
            rewards=rewards[sampled],
            group_ids=batch.group_ids[first][sampled],
            lengths=lengths[sampled],
            baselines=None if batch.baselines is None else batch.baselines.double()[first][sampled],
        )
        per_sequence[sampled] = advantage.of(compared)
    returns = None
    if advantage.critic:
        per_token, returns = _by_critic(per_sequence[sample], kl, shaping.discount, batch, mask)
    else:
        per_token = spread(per_sequence[sample], cu_seqlens)
        if advantage.whitened and shaping.kl_coef:
            per_token = per_token - discounted_sums(kl, cu_seqlens)
    if advantage.whitened:
        per_token = whiten(per_token, mask)
    return Credit(
        advantages=torch.where(mask, per_token, torch.zeros_like(per_token)).float(),
        returns=None if returns is None else returns.float(),
    )


def _by_critic(
    rewards: Tensor, cost: Tensor, discount: Discount, batch: TrainBatch, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """`gae` over the tokens of ``mask``: advantages and returns [T] float64, 0 off it.

    ``rewards`` [N] belong to each sequence's last token, ``cost`` [T] is taken off the tokens' own rewards. What lies
    between two answers of a conversation is no action: the next token that was sampled follows.
    """
    assert batch.values is not None, "annotate() scores with the critic before advantages are computed"
    counts = sequence_sums(mask.long(), batch.cu_seqlens)
    ends = counts.cumsum(0)
    per_token = -cost[mask]
    per_token[(ends - 1)[counts > 0]] += rewards[counts > 0]
    bounds = torch.cat([ends.new_zeros(1), ends])
    found = gae(per_token, batch.values.double()[mask], bounds, discount)
    advantages, returns = (cost.new_zeros(cost.shape).masked_scatter(mask, values) for values in found)
    return advantages, returns


def explained_variance(batch: TrainBatch) -> float | None:
    """``1 - Var(returns - values) / Var(returns)`` over the batch's sampled tokens; None without critic or variance.

    1: the critic's values before the step were the returns; 0: no better than their mean.
    """
    if batch.values is None or batch.returns is None:
        return None
    mask = batch.loss_mask & ~spread(batch.given, batch.cu_seqlens)
    values, returns = batch.values[mask].double(), batch.returns[mask].double()
    variance = float(returns.var(correction=0)) if returns.numel() else 0.0
    return 1.0 - float((returns - values).var(correction=0)) / variance if variance else None


def _kl_cost(shaping: Shaping, batch: TrainBatch, on: Tensor) -> Tensor:
    """The coefficient times the KL divergence of each token, [T] float64, 0 off the mask ``on``."""
    zeros = torch.zeros_like(batch.rollout_logprobs, dtype=torch.float64)
    if not shaping.kl_coef:
        return zeros
    assert batch.ref_logprobs is not None, "annotate() scores the reference before advantages are computed"
    policy = torch.where(on, batch.rollout_logprobs.double(), zeros)
    return shaping.kl_coef * shaping.kl(policy, torch.where(on, batch.ref_logprobs.double(), zeros))


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / (std + eps)`` over the tokens of the mask, the biased standard deviation. Packed [T]."""
    chosen = values[mask]
    if not chosen.numel():
        return values
    return (values - chosen.mean()) / (chosen.std(correction=0) + EPS)

"""Advantages from group rewards: pure functions of tensors.

All take ``rewards`` [N] fp32 and ``group_ids`` [N] int64 and return [N] fp32, one number per
sequence. ``to_tokens`` spreads them over a packed batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _group_moments(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per sequence: size of its group, sum of its group's rewards, group sum of squared deviations. Each [N]."""
    _, index = torch.unique(group_ids, return_inverse=True)  # [N]
    n_groups = int(index.max()) + 1 if index.numel() else 0
    zeros = torch.zeros(n_groups, dtype=torch.float64, device=rewards.device)
    values = rewards.double()
    size = zeros.clone().index_add_(0, index, torch.ones_like(values))
    total = zeros.clone().index_add_(0, index, values)
    deviation = values - (total / size)[index]
    squares = zeros.clone().index_add_(0, index, deviation.square())
    return size[index], total[index], squares[index]


def grpo(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """Group-relative advantage, DeepSeekMath (arXiv 2402.03300) section 4.1.

    ``(r - mean) / (std + eps)`` with the unbiased standard deviation; without
    ``normalize_std`` only the mean is taken off (Dr. GRPO, arXiv 2503.20783). A group whose
    rewards are all equal gets exactly 0.
    """
    size, total, squares = _group_moments(rewards, group_ids)
    advantage = rewards.double() - total / size
    if normalize_std:
        std = (squares / (size - 1).clamp_min(1)).sqrt()
        advantage = torch.where(squares > 0, advantage / (std + eps), torch.zeros_like(advantage))
    return advantage.float()


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean of the group's other rewards, RLOO (arXiv 2402.14740) equation 8."""
    size, total, _ = _group_moments(rewards, group_ids)
    values = rewards.double()
    others = (total - values) / (size - 1).clamp_min(1)
    return torch.where(size > 1, values - others, torch.zeros_like(values)).float()


def per_sample(
    advantage: Callable[[Tensor, Tensor], Tensor], rewards: Tensor, group_ids: Tensor, sample_ids: Tensor
) -> Tensor:
    """``advantage`` over samples, each counted once, given to every sequence of the sample. [N]

    Sequences with the same entry of ``sample_ids`` [N] have the same reward and group.
    """
    first, index = _samples(sample_ids)
    return advantage(rewards[first], group_ids[first])[index]


def sample_rewards(rewards: Tensor, sample_ids: Tensor) -> Tensor:
    """Each sample's reward once, however many sequences it has. [samples]"""
    first, _ = _samples(sample_ids)
    return rewards[first]


def _samples(sample_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The first sequence of every sample [samples], and every sequence's sample [N]."""
    _, index = torch.unique(sample_ids, return_inverse=True)
    order = torch.arange(index.numel(), device=index.device)
    first = order.new_full((int(index.max()) + 1,), index.numel())
    return first.scatter_reduce(0, index, order, reduce="amin"), index


def to_tokens(per_sequence: Tensor, cu_seqlens: Tensor, loss_mask: Tensor) -> Tensor:
    """Spread [N] over tokens [T]; 0 where ``loss_mask`` is off."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.repeat_interleave(per_sequence, lengths) * loss_mask.to(per_sequence.dtype)

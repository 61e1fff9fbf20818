"""Loss reduction: a weight per token and one denominator per optimizer step; sums over sequences."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token", "sequence", "constant"]


def token_weights(loss_mask: Tensor, cu_seqlens: Tensor, reduction: Reduction) -> Tensor:
    """Weights [T] fp32: 1 on the mask, or 1 / (masked tokens of the sequence) for ``sequence``."""
    mask = loss_mask.float()
    if reduction != "sequence":
        return mask
    counts = sequence_sums(mask, cu_seqlens)
    return mask / spread(counts.clamp_min(1.0), cu_seqlens)


def denominator(loss_mask: Tensor, n_sequences: int, reduction: Reduction, max_new_tokens: int) -> float:
    """Divisor of the summed loss of a whole minibatch (over all data-parallel ranks)."""
    if reduction == "token":
        return max(float(loss_mask.sum()), 1.0)
    if reduction == "sequence":
        return float(max(n_sequences, 1))
    return float(max(n_sequences, 1) * max_new_tokens)


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum packed [T] ``values`` over each of the N sequences. [N]"""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    index = torch.repeat_interleave(torch.arange(lengths.numel(), device=values.device), lengths)  # [T]
    return torch.zeros(lengths.numel(), dtype=values.dtype, device=values.device).index_add(0, index, values)


def spread(per_sequence: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Give each of [N] values to all tokens of its sequence. [T]"""
    return torch.repeat_interleave(per_sequence, cu_seqlens[1:] - cu_seqlens[:-1])

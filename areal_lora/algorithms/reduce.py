"""Loss reduction: a weight per token and one denominator per optimizer step."""

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
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    index = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)  # [T]
    counts = torch.zeros(lengths.numel(), device=mask.device).index_add_(0, index, mask)
    return mask / counts.clamp_min(1.0)[index]


def denominator(loss_mask: Tensor, n_sequences: int, reduction: Reduction, max_new_tokens: int) -> float:
    """Divisor of the summed loss of a whole minibatch (over all data-parallel ranks)."""
    if reduction == "token":
        return max(float(loss_mask.sum()), 1.0)
    if reduction == "sequence":
        return float(max(n_sequences, 1))
    return float(max(n_sequences, 1) * max_new_tokens)

"""Draw tokens on a CPU as vLLM does, with fewer tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def draw_on_cpu(
    logits: torch.Tensor, generators: Mapping[int, torch.Generator], k: Any, p: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the tokens that vLLM's ``forward_cpu`` draws from ``logits`` [B, V], and return log-probabilities [B, V].

    ``generators`` are by row. vLLM takes each row's number through a tensor of its own, which costs three times this.
    """
    logits = apply_top_k_top_p(logits, k, p).float()
    seeds = torch.randint(0, 2**31, (len(logits),), dtype=torch.long)
    rows = seeds.split(1)
    for row, generator in generators.items():
        rows[row].random_(0, 2**31, generator=generator)
    return torch.ops._C.fused_gumbel_argmax(logits, seeds), logits.log_softmax(dim=-1)

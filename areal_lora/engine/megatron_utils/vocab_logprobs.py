"""Log-probabilities and entropy when each tensor-parallel rank holds a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallel(torch.autograd.Function):  # type: ignore[misc]
    """``(log p(target), entropy)`` from logit shards [n, V / tp], both [n] fp32.

    With p = softmax(z): d log p(y) / dz = onehot(y) - p, and d H / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        world = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        top = logits.amax(-1)
        if world > 1:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        exps = shifted.exp()
        first = rank * logits.shape[-1]
        local = target - first
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        picked = shifted.gather(-1, local[:, None])[:, 0] * here
        sums = torch.stack([exps.sum(-1), picked, (exps * shifted).sum(-1)])  # [3, n]
        if world > 1:
            dist.all_reduce(sums, group=group)
        total, chosen, weighted = sums.unbind(0)
        log_total = total.log()
        entropy = log_total - weighted / total
        probs = exps.div_(total[:, None])
        ctx.save_for_backward(probs, shifted, log_total, entropy, local, here)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probs, shifted, log_total, entropy, local, here = ctx.saved_tensors
        d_logprob, d_entropy = grads
        grad = probs * -d_logprob[:, None]
        grad.scatter_add_(-1, local[:, None], (d_logprob * here)[:, None])
        if bool((d_entropy != 0).any()):
            grad -= d_entropy[:, None] * probs * (shifted - log_total[:, None] + entropy[:, None])
        return grad, None, None


def vocab_logprobs(
    logits: Tensor, target: Tensor, *, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``target`` [n] and entropy, [n] fp32 each, differentiable.

    ``logits`` [n, V / tp] is this rank's part of the vocabulary, in rank order.
    """
    logprobs, entropy = _VocabParallel.apply(logits.float() / temperature, target, group)
    return logprobs, entropy

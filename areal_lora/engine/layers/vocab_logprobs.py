"""Log-probabilities and entropy when each tensor-parallel rank holds a part of the vocabulary.

Rows are computed in parts of `CHUNK` logits, and again in the backward pass. Only these parts exist in fp32. The logits
and their gradient have the model's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 2**24  # logits of one part; each of its fp32 buffers takes 64 MiB


class _VocabParallel(torch.autograd.Function):  # type: ignore[misc]
    """``(log p(target), entropy)`` from logit shards [t, V / tp] of which prediction k uses row ``rows[k]``.

    With z the logits over the temperature and p = softmax(z): d log p(y) / dz = onehot(y) - p, and
    d H / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, target: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        world = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        top = (logits.amax(-1).float() / temperature).index_select(0, rows)
        if world > 1:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        local = target - rank * logits.shape[-1]
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        sums = top.new_empty(3, rows.numel())  # of exp(z), z of the target, of z exp(z), all after the maximum
        for part, shifted in _parts(logits, rows, top, temperature):
            sums[1, part] = shifted.gather(-1, local[part, None])[:, 0] * here[part]
            exps = shifted.exp()
            sums[0, part] = exps.sum(-1)
            sums[2, part] = exps.mul_(shifted).sum(-1)
        if world > 1:
            dist.all_reduce(sums, group=group)
        total, chosen, weighted = sums.unbind(0)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, rows, top, log_total, entropy, local, here)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits, rows, top, log_total, entropy, local, here = ctx.saved_tensors
        d_logprob, d_entropy = grads
        gradient = torch.zeros_like(logits)
        for part, shifted in _parts(logits, rows, top, ctx.temperature):
            logp = shifted.sub_(log_total[part, None])
            change = torch.zeros_like(logp) if d_logprob is None else logp.exp().mul_(-d_logprob[part, None])
            if d_logprob is not None:
                change.scatter_add_(-1, local[part, None], (d_logprob[part] * here[part])[:, None])
            if d_entropy is not None:
                change -= d_entropy[part, None] * logp.exp().mul_(logp + entropy[part, None])
            gradient.index_add_(0, rows[part], change.div_(ctx.temperature).to(logits.dtype))
        return gradient, None, None, None, None


def _parts(logits: Tensor, rows: Tensor, top: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Runs of predictions, and their logits over the temperature minus ``top``, fp32 [run, V / tp]."""
    size = max(1, CHUNK // logits.shape[-1])
    for first in range(0, rows.numel(), size):
        part = slice(first, first + size)
        scaled = logits.index_select(0, rows[part]).float().div_(temperature)
        yield part, scaled.sub_(top[part, None])


def vocab_logprobs(
    logits: Tensor, rows: Tensor, target: Tensor, group: dist.ProcessGroup | None, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``target`` [p] and entropy, [p] fp32 each, differentiable.

    ``logits`` [t, V / tp] is this rank's part of the vocabulary, in rank order. Prediction k is that of row
    ``rows[k]`` [p] int64; a row may have several.
    """
    logprobs, entropy = _VocabParallel.apply(logits, rows, target, temperature, group)
    return logprobs, entropy

"""Attention of runs of queries over runs of keys, with log-sum-exps: the kernels below `layers.attention`.

Shapes: nq queries of h heads, nk keys and values of g heads, width d; run i has queries ``cu_q[i]:cu_q[i + 1]`` and
keys ``cu_k[i]:cu_k[i + 1]``. Causal attention is aligned at the ends: the last query of a run sees its last key.
A log-sum-exp [h, nq] fp32 is that of a query's scaled scores.

CUDA computes all runs in one launch of flash attention (Dao, arXiv 2307.08691), in half precision. Other devices and
precisions compute padded blocks of runs of similar lengths; only a block that is not causal, or has a window, needs a
mask.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SPREAD = 2  # a block's longest run, in multiples of its shortest
Saved = tuple[Tensor, ...]
"""What a kernel's forward pass leaves for its backward pass beside its inputs and outputs."""


@dataclass(frozen=True, slots=True)
class PaddedRuns:
    """Padded runs: rows of queries [m, a] and keys [m, p]; ``real`` [m, a] and ``seen`` [m, p] are no padding."""

    queries: Tensor
    keys: Tensor
    real: Tensor
    seen: Tensor

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive, [m, 1, 1, p]; [m, 1, a, p] for causal attention in a ``window`` that ends at the query's key."""
        allowed = self.seen[:, None]
        if window is not None:
            n_q, n_k = self.real.sum(1), self.seen.sum(1)
            last = torch.arange(self.real.shape[1], device=n_q.device).minimum(n_q[:, None] - 1) + (n_k - n_q)[:, None]
            behind = last[:, :, None] - torch.arange(self.seen.shape[1], device=n_q.device)
            allowed = allowed & (behind >= 0) & (behind < window)
        zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return zeros.masked_fill_(~allowed, float("-inf"))[:, None]


class Scoring(NamedTuple):
    """How the kernel of a block sees keys: an additive mask, or causally; scores are multiplied by ``scale``."""

    mask: Tensor | None
    causal: bool
    scale: float


class VarlenRuns:
    """Runs of queries and keys, of ``lengths_q`` and ``lengths_k`` [n] on the host, on ``device``."""

    def __init__(self, lengths_q: np.ndarray[Any, Any], lengths_k: np.ndarray[Any, Any], device: torch.device) -> None:
        self._lengths, self._device = (lengths_q, lengths_k), device
        self.max_q, self.max_k = int(lengths_q.max()), int(lengths_k.max())
        bounds = np.zeros((2, len(lengths_q) + 1), dtype=np.int32)
        np.cumsum([lengths_q, lengths_k], axis=1, out=bounds[:, 1:])
        self.cu_q, self.cu_k = torch.from_numpy(bounds).to(device, non_blocking=True)

    @cached_property
    def blocks(self) -> list[PaddedRuns]:
        """Of runs sorted by length. A run without keys is in no block."""
        n_q, n_k = self._lengths
        starts = (n_q.cumsum() - n_q, n_k.cumsum() - n_k)
        order = np.lexsort((-n_k, -n_q))
        order = order[(n_q[order] > 0) & (n_k[order] > 0)]
        found, first = [], 0
        for i in range(1, len(order) + 1):
            if i == len(order) or n_q[order[first]] > SPREAD * n_q[order[i]]:
                rows, first = order[first:i], i
                padded = (_padded(starts[side][rows], self._lengths[side][rows]) for side in (0, 1))
                (queries, real), (keys, seen) = padded
                found.append(PaddedRuns(*(x.to(self._device) for x in (queries, keys, real, seen))))
        return found


def _padded(start: np.ndarray[Any, Any], length: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    """Row numbers [m, longest] int64, padding has that of the first, and what is no padding."""
    columns = np.arange(length.max())
    real = columns < length[:, None]
    return torch.from_numpy(np.where(real, start[:, None] + columns, start[:, None])), torch.from_numpy(real)


def has_flash(x: Tensor) -> bool:
    """Whether torch's flash attention takes it. On ``meta`` tensors the bench counts what a GPU would launch."""
    return x.device.type in ("cuda", "meta") and x.dtype in (torch.bfloat16, torch.float16)


def forward(
    runs: VarlenRuns, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor, Saved]:
    """Attention of ``q`` [nq, h, d] over ``k`` and ``v`` [nk, g, d]: context [nq, h, d] and log-sum-exp [h, nq].

    With a ``window``, which is causal, a query sees its own key and the ``window - 1`` before it.
    """
    if has_flash(q):
        out, lse, *saved = torch.ops.aten._flash_attention_forward(
            q, k, v, runs.cu_q, runs.cu_k, runs.max_q, runs.max_k, 0.0, causal, False, scale=scale, **_band(window)
        )
        return out, lse, tuple(saved[:2])
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), float("-inf"), dtype=torch.float32)
    for block in runs.blocks:
        found, sums = _block_forward(*_heads(block, q, k, v), _scoring(block, q, causal, window, scale))
        rows = block.queries[block.real]
        out.index_copy_(0, rows, found.transpose(1, 2)[block.real])
        lse.index_copy_(1, rows, sums.transpose(1, 2)[block.real].t())
    return out, lse, ()


def backward(
    runs: VarlenRuns,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Saved,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    ``out`` and ``lse`` may be those of attention over more keys, of which these are a part: the gradients are then
    those of this part (Liu et al., arXiv 2310.01889, appendix).
    """
    if has_flash(q):
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            d_out, q, k, v, out, lse, runs.cu_q, runs.cu_k, runs.max_q, runs.max_k, 0.0, causal, *saved, scale=scale,
            **_band(window),
        )  # fmt: skip
        return grads
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for block in runs.blocks:
        # Queries of padding are copies of a real one.
        over = _gather(d_out, block.queries).masked_fill_(~block.real[:, None, :, None], 0.0)
        context, sums = _gather(out, block.queries), lse[:, block.queries].transpose(0, 1)
        how = _scoring(block, q, causal, window, scale)
        parts = _block_backward(over, *_heads(block, q, k, v), context, sums.contiguous(), how)
        dq.index_copy_(0, block.queries[block.real], parts[0].transpose(1, 2)[block.real])
        for total, part in ((dk, parts[1]), (dv, parts[2])):
            total.index_add_(0, block.keys.reshape(-1), part.transpose(1, 2).flatten(0, 1))
    return dq, dk, dv


def _band(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _scoring(block: PaddedRuns, q: Tensor, causal: bool, window: int | None, scale: float) -> Scoring:
    """Padding follows the runs, so that a causal kernel needs no mask without a window."""
    plain = causal and window is None
    return Scoring(None if plain else block.mask(window, q.dtype), plain, scale)


def _heads(block: PaddedRuns, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _gather(q, block.queries), _gather(k, block.keys), _gather(v, block.keys)


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """[m, heads, a, d] of rows [m, a] of x [n, heads, d]."""
    return x.index_select(0, rows.reshape(-1)).view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def _block_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Any:
    if q.device.type != "cpu":
        return _plain_forward(q, k, v, how)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, how.causal, attn_mask=how.mask, scale=how.scale)


def _block_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring) -> Any:
    if q.device.type != "cpu":
        return _plain_backward(d_out, q, k, v, out, lse, how)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(d_out, q, k, v, out, lse, 0.0, how.causal, attn_mask=how.mask, scale=how.scale)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Any:
    scores = _scores(q, k, how)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ _per_head(v, q), lse


def _plain_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring) -> Any:
    p = (_scores(q, k, how) - lse[..., None]).exp()
    d_p = d_out.float() @ _per_head(v, q).float().transpose(-1, -2)
    d_s = p * (d_p - (d_out.float() * out.float()).sum(-1, keepdim=True)) * how.scale
    grads = (d_s @ _per_head(k, q).float(), d_s.transpose(-1, -2) @ q.float(), p.transpose(-1, -2) @ d_out.float())
    dq, dk, dv = (x.to(q.dtype) for x in grads)
    shape = (k.shape[0], k.shape[1], -1, *k.shape[2:])
    return dq, dk.view(shape).sum(2), dv.view(shape).sum(2)


def _scores(q: Tensor, k: Tensor, how: Scoring) -> Tensor:
    scores = (q @ _per_head(k, q).transpose(-1, -2)).float() * how.scale
    if how.causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores if how.mask is None else scores + how.mask


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

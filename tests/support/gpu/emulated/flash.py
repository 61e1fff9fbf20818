"""Flash attention of sequences of several lengths by its definition (Dao, arXiv 2307.08691), for torch's CPU build.

What CUDA's kernels demand is asserted: half precision, int32 bounds, widths, strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _runs(bounds_q: Tensor, bounds_k: Tensor) -> Iterator[tuple[slice, slice]]:
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    runs = zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True)
    return ((slice(*own), slice(*keys)) for own, keys in runs if own[0] < own[1] and keys[0] < keys[1])


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int | None, right: int | None) -> Tensor:
    """[heads, nq, nk]; the last query is beside the last key."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))  # of a key before its query
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if right is not None and right >= 0:
        hidden |= ahead > right
    if left is not None and left >= 0:
        hidden |= ahead < -left
    return scores.masked_fill(hidden, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, window_size_left: int | None = None,
    window_size_right: int | None = None, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Context [nq, heads, d] and log-sum-exp [heads, nq]: infinite where a query has no key."""
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert dropout == 0.0
    assert not any(others.values())
    assert q.shape[-1] == v.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), torch.inf)
    share = q.shape[1] // k.shape[1]
    for own, keys in _runs(bounds_q, bounds_k):
        assert own.stop - own.start <= max_q
        assert keys.stop - keys.start <= max_k
        key, value = (x[keys].float().repeat_interleave(share, 1) for x in (k, v))
        scores = _scores(q[own].float(), key, scale, causal, window_size_left, window_size_right)
        found = torch.logsumexp(scores, -1)
        lse[:, own] = found.masked_fill(found.isneginf(), torch.inf)
        out[own] = torch.einsum("hqk,khd->qhd", (scores - lse[:, own, None]).exp(), value).to(q.dtype)
    return out, lse, torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64), torch.empty(0)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds_q: Tensor, bounds_k: Tensor,
    max_q: int, max_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, with ``out`` and ``lse`` of all keys of a query, of which these may be a part."""
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == torch.float32
    d_q, d_k, d_v = (torch.zeros(x.shape) for x in (q, k, v))
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    for own, keys in _runs(bounds_q, bounds_k):
        query, d_out = q[own].float(), grad[own].float()
        key, value = (x[keys].float().repeat_interleave(share, 1) for x in (k, v))
        scores = _scores(query, key, scale, causal, window_size_left, window_size_right)
        weights = (scores - lse[:, own, None]).exp()
        inner = (d_out * out[own].float()).sum(-1).t()[..., None]
        d_scores = weights * (torch.einsum("qhd,khd->hqk", d_out, value) - inner) * scale
        d_q[own] = torch.einsum("hqk,khd->qhd", d_scores, key)
        d_k[keys] += torch.einsum("hqk,qhd->khd", d_scores, query).unflatten(1, (groups, share)).sum(2)
        d_v[keys] += torch.einsum("hqk,qhd->khd", weights, d_out).unflatten(1, (groups, share)).sum(2)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def install() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library

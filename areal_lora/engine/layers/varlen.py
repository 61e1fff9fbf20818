"""Attention of runs of queries over runs of keys: the kernels below `layers.attention`.

Shapes: nq queries of h heads, nk keys and values of g heads, width d; run i has queries ``cu_q[i]:cu_q[i + 1]`` and
keys ``cu_k[i]:cu_k[i + 1]``. Causal attention is aligned at the ends: the last query of a run sees its last key.
A log-sum-exp [nq, h] fp32 is that of a query's scaled scores.

CUDA computes all runs in one launch of flash attention (Dao, arXiv 2307.08691), in half precision. Other devices and
precisions compute padded blocks of runs of similar lengths.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from areal_lora.platforms.device import upload

SPREAD = 2  # a block's longest run, in multiples of its shortest
Saved = tuple[Tensor, ...]
"""What a kernel's forward pass leaves for its backward pass beside its inputs and outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRuns:
    """Rows of queries [m, a] and keys [m, p], of which ``n_q`` and ``n_k`` [m] are no padding.

    ``square``: each run has as many keys as queries. Padding follows them, and no mask but the causal one is needed.
    """

    queries: Tensor
    keys: Tensor
    n_q: Tensor
    n_k: Tensor
    square: bool
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive, [m, 1, a, p], of causal attention in a ``window`` that ends at the query's key; None: causal."""
        if self.square and (window is None or window >= self.keys.shape[1]):
            return None
        if window not in self.masks:
            queries, keys = (torch.arange(x.shape[1], device=x.device) for x in (self.queries, self.keys))
            # Padding sees what the run's last query sees: a row without a key is NaN in some kernels.
            last = (queries.minimum(self.n_q[:, None] - 1) + (self.n_k - self.n_q)[:, None])[:, :, None]
            hidden = keys > last
            if window is not None:
                hidden |= keys <= last - window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.masks[window] = zeros.masked_fill_(hidden, float("-inf"))[:, None]
        return self.masks[window]


class VarlenRuns:
    """Runs of queries and keys, of ``lengths_q`` and ``lengths_k`` [n] on the host, on ``device``.

    ``rows`` [nk] are those in which `padded` finds the keys and values; None: one after the other.
    """

    def __init__(
        self,
        lengths_q: np.ndarray[Any, Any],
        lengths_k: np.ndarray[Any, Any],
        device: torch.device,
        rows: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self._lengths, self._device, self._rows = (lengths_q, lengths_k), device, rows
        self.max_q, self.max_k = int(lengths_q.max()), int(lengths_k.max())
        bounds = np.zeros((2, len(lengths_q) + 1), dtype=np.int32)
        np.cumsum([lengths_q, lengths_k], axis=1, out=bounds[:, 1:])
        self.cu_q, self.cu_k = upload(torch.from_numpy(bounds), device)

    @cached_property
    def blocks(self) -> tuple[list[PaddedRuns], Tensor]:
        """Of runs sorted by whether keys precede their queries, then by length; the place [nq] of each query there."""
        n_q, n_k = self._lengths
        starts = (n_q.cumsum() - n_q, n_k.cumsum() - n_k)
        order = np.lexsort((-n_k, -n_q, n_k > n_q))
        order = order[n_q[order] > 0]
        square = (n_k == n_q)[order]
        found, places, first, rows = list[PaddedRuns](), np.empty(n_q.sum(), dtype=np.int64), 0, 0
        for i in range(1, len(order) + 1):
            if i == len(order) or square[i] != square[first] or n_q[order[first]] > SPREAD * n_q[order[i]]:
                chosen, is_square, first = order[first:i], bool(square[first]), i
                queries, keys = (_padded(starts[side][chosen], self._lengths[side][chosen]) for side in (0, 1))
                keys = keys if self._rows is None else self._rows[keys]
                real = np.arange(queries.shape[1]) < n_q[chosen][:, None]
                places[queries[real]] = rows + np.flatnonzero(real)
                rows += real.size
                numbers = {"queries": queries, "keys": keys, "n_q": n_q[chosen], "n_k": n_k[chosen]}
                moved = {name: upload(torch.from_numpy(x), self._device) for name, x in numbers.items()}
                found.append(PaddedRuns(**moved, square=is_square))
        return found, upload(torch.from_numpy(places), self._device)


def _padded(start: np.ndarray[Any, Any], length: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Row numbers [m, longest] int64; padding has that of the first."""
    columns = np.arange(length.max())
    return np.where(columns < length[:, None], start[:, None] + columns, start[:, None])


def has_flash(x: Tensor) -> bool:
    """Whether torch's flash attention takes it. On ``meta`` tensors the bench counts what a GPU would launch."""
    return x.device.type in ("cuda", "meta") and x.dtype in (torch.bfloat16, torch.float16)


def padded(runs: VarlenRuns, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Causal attention of ``q`` [nq, h, d] over ``k`` [nk, g, d] and ``v`` [nk, g, dv]: [nq, h, dv].

    With a ``window`` a query sees its own key and the ``window - 1`` before it. Differentiable; for devices without
    flash attention.
    """
    blocks, places = runs.blocks
    by_row = q.flatten(1), k.flatten(1), v.flatten(1)  # gathered in half the time
    rows = list[Tensor]()
    for block in blocks:
        at = zip(by_row, (q, k, v), (block.queries, block.keys, block.keys), strict=True)
        query, key, value = (_heads(*rows_of) for rows_of in at)
        mask = block.mask(window, q.dtype)
        found = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        rows.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(rows).index_select(0, places)


def _heads(by_row: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """[m, heads, a, d] of rows [m, a] of x [n, heads, d], which are those of ``by_row`` [n, heads * d]."""
    return by_row.index_select(0, rows.reshape(-1)).view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def forward(
    runs: VarlenRuns, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor, Saved]:
    """Flash attention of ``q`` [nq, h, d] over ``k`` and ``v`` [nk, g, d]: context, log-sum-exp, for `backward`.

    ``window`` as in `padded`.
    """
    out, lse, *saved = torch.ops.aten._flash_attention_forward(
        q, k, v, runs.cu_q, runs.cu_k, runs.max_q, runs.max_k, 0.0, causal, False, scale=scale, **_band(window)
    )
    return out, lse.t(), tuple(saved[:2])


def backward(
    runs: VarlenRuns,
    d_out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    saved: Saved,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, which are ``inputs``.

    ``out`` and ``lse`` may be those of attention over more keys, of which these are a part: the gradients are then
    those of this part (Liu et al., arXiv 2310.01889, appendix).
    """
    at = (runs.cu_q, runs.cu_k, runs.max_q, runs.max_k)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        d_out, *inputs, out, lse.t().contiguous(), *at, 0.0, causal, *saved, scale=scale, **_band(window)
    )
    return grads


def _band(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}

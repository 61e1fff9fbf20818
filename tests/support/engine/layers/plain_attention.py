"""Flash attention written out, run by run, for a machine without a GPU: `varlen.forward` and `varlen.backward`.

It has no tiles and no half precision: what the kernels themselves do wrong stays hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lora.engine.layers import varlen
from areal_lora.engine.layers.varlen import VarlenRuns


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a GPU."""
    monkeypatch.setattr(varlen, "has_flash", lambda _: True)
    monkeypatch.setattr(varlen, "forward", forward)
    monkeypatch.setattr(varlen, "backward", backward)


def forward(runs: VarlenRuns, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for a, b in _slices(runs):
        scores = _scores(q[a], k[b], **how)
        lse[a] = scores.logsumexp(-1).t()
        out[a] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), _wide(v[b], q))
    return out, lse, (q.new_zeros(2), q.new_zeros(()))


def backward(
    runs: VarlenRuns,
    d_out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    _: tuple[Tensor, ...],
    **how: Any,
) -> tuple[Tensor, ...]:
    q, k, v = inputs
    dq, dk, dv = (torch.empty_like(x) for x in inputs)
    for a, b in _slices(runs):
        p = (_scores(q[a], k[b], **how) - lse[a].t()[..., None]).exp()
        d_p = torch.einsum("ihd,jhd->hij", d_out[a], _wide(v[b], q))
        d_s = p * (d_p - (d_out[a] * out[a]).sum(-1).t()[..., None]) * how["scale"]
        dq[a] = torch.einsum("hij,jhd->ihd", d_s, _wide(k[b], q))
        dk[b] = _narrow(torch.einsum("hij,ihd->jhd", d_s, q[a]), k)
        dv[b] = _narrow(torch.einsum("hij,ihd->jhd", p, d_out[a]), v)
    return dq, dk, dv


def _slices(runs: VarlenRuns) -> Iterator[tuple[slice, slice]]:
    bounds = (pairwise(x.tolist()) for x in (runs.cu_q, runs.cu_k))
    return ((slice(*a), slice(*b)) for a, b in zip(*bounds, strict=True))


def _scores(q: Tensor, k: Tensor, *, causal: bool, scale: float, window: int | None = None) -> Tensor:
    """[h, queries, keys], aligned at their ends."""
    scores = scale * torch.einsum("ihd,jhd->hij", q, _wide(k, q))
    behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = (behind < 0) & causal | (behind >= (window or len(k) + 1))
    return scores.masked_fill(hidden, float("-inf"))


def _wide(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _narrow(x: Tensor, like: Tensor) -> Tensor:
    return x.view(len(x), like.shape[1], -1, x.shape[2]).sum(2)

"""All routed experts of a layer with LoRA inside, as one autograd function of grouped matrix products.

It needs nothing but torch and runs on every device. Shapes: T rows sorted by expert, n experts, hidden h, width f::

    g = x W1' + s (d(x) A1') B1'       [T, 2f]   d: dropout, the identity where nothing is trained
    u = silu(g[:, :f]) g[:, f:] p      [T, f]    p: the router's weight of each row
    y = u W2' + s (d(u) A2') B2'       [T, h]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from areal_lora.engine.layers.dropout import Dropout, kept

ALIGN_BYTES = 16  # torch's grouped matrix product wants rows that start at multiples of this


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of each expert: expert e has rows ``bounds[e]:bounds[e + 1]``. Weights are [n, ...] or [...] for all."""

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, splits: Sequence[int]) -> Groups:
        return cls((0, *accumulate(splits)))

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, out] = x [T, in] times the transposed weight [n, out, in] of each row's expert."""
        if weight.dim() == 2:
            return x @ weight.t()
        if x.is_cuda and _aligned(x, weight):
            return functional.grouped_mm(x, weight.transpose(1, 2), offs=self._ends(x))
        out = x.new_empty(x.shape[0], weight.shape[1])
        for e, rows in self._slices():
            torch.mm(x[rows], weight[e].t(), out=out[rows])
        return out

    def add_times(self, out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Add `times` to ``out`` in place."""
        if weight.dim() == 2:
            return out.addmm_(x, weight.t())
        if x.is_cuda:
            return out.add_(self.times(x, weight))
        for e, rows in self._slices():
            out[rows].addmm_(x[rows], weight[e].t())
        return out

    def outer(self, y: Tensor, x: Tensor, like: Tensor) -> Tensor:
        """The gradient fp32 of a weight ``like`` [n, out, in]: y [T, out] transposed times x [T, in], per expert."""
        if like.dim() == 2:
            return (y.t() @ x).float()
        grad = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        for e, rows in self._slices():
            if y.dtype == torch.float32:
                torch.mm(y[rows].t(), x[rows], out=grad[e])
            else:
                grad[e] = y[rows].t() @ x[rows]
        return grad

    def _slices(self) -> Iterator[tuple[int, slice]]:
        return ((e, slice(a, b)) for e, (a, b) in enumerate(pairwise(self.bounds)) if b > a)

    def _ends(self, x: Tensor) -> Tensor:
        return torch.tensor(self.bounds[1:], dtype=torch.int32, device=x.device)


def _aligned(x: Tensor, weight: Tensor) -> bool:
    item = x.element_size()
    return bool(x.shape[0]) and not (x.shape[1] * item % ALIGN_BYTES or weight.shape[1] * item % ALIGN_BYTES)


class ExpertMlp(torch.autograd.Function):  # type: ignore[misc]
    """The module's formulas. Base weights are constants; an adapter that is off has None for A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        a1: Tensor | None,
        b1: Tensor | None,
        a2: Tensor | None,
        b2: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        groups: Groups,
        scales: tuple[float, float],
        keeps: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        g = groups.times(x, w1)
        h1 = _add_adapter(groups, g, x, a1, b1, scales[0], keeps[0])
        gate, up = g.chunk(2, dim=-1)
        act = functional.silu(gate).mul_(up)
        u = act * probs[:, None]
        y = groups.times(u, w2)
        h2 = _add_adapter(groups, y, u, a2, b2, scales[1], keeps[1])
        ctx.save_for_backward(x, probs, a1, b1, a2, b2, w1, w2, g, act, h1, h2, *keeps)
        ctx.groups, ctx.scales = groups, scales
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, probs, a1, b1, a2, b2, w1, w2, g, act, h1, h2, *keeps = ctx.saved_tensors
        groups: Groups = ctx.groups
        dy = dy.contiguous()
        du = groups.times(dy, w2.transpose(1, 2))
        da2, db2 = _adapter_grads(groups, dy, du, lambda: act * probs[:, None], h2, a2, b2, ctx.scales[1], keeps[1])
        d_probs = (du * act).sum(-1)
        du.mul_(probs[:, None])
        gate, up = g.chunk(2, dim=-1)
        dg = torch.empty_like(g)
        d_gate, d_up = dg.chunk(2, dim=-1)
        torch.mul(du, functional.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(du.mul_(up), gate))
        dx = groups.times(dg, w1.transpose(1, 2))
        da1, db1 = _adapter_grads(groups, dg, dx, lambda: x, h1, a1, b1, ctx.scales[0], keeps[0])
        return dx, d_probs, da1, db1, da2, db2, None, None, None, None, None


def _add_adapter(
    groups: Groups, out: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None, scale: float, keep: Tensor | None
) -> Tensor | None:
    """Add ``scale * B A x`` to ``out``, of x what ``keep`` [T, in] keeps; returns the scaled ``A x`` [T, r]."""
    if a is None or b is None:
        return None
    hidden = groups.times(kept(x, keep), a.to(x.dtype)).mul_(scale)
    groups.add_times(out, hidden, b.to(x.dtype))
    return hidden


def _adapter_grads(
    groups: Groups,
    dy: Tensor,
    dx: Tensor,
    x: Callable[[], Tensor],
    hidden: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    scale: float,
    keep: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of A and B from that of the output; adds the adapter's part to the input's gradient ``dx``."""
    if a is None or b is None:
        return None, None
    assert hidden is not None
    dh = groups.times(dy, b.to(dy.dtype).transpose(-1, -2)).mul_(scale)
    back = a.to(dy.dtype).transpose(-1, -2)
    if keep is None:
        groups.add_times(dx, dh, back)
    else:
        dx.add_(groups.times(dh, back).masked_fill_(~keep, 0.0))
    return groups.outer(dh, kept(x(), keep), a), groups.outer(dy, hidden, b)


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """One adapter's part: stacks ``a`` [n, r, in] and ``b`` [n, out, r], or one [r, in], [out, r] of all experts.

    ``sites`` are the numbers of the experts' sites (`dropout.site_key`), one each or one of all.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    sites: tuple[int, ...] = ()

    def keep(
        self, dropout: Dropout | None, keys: Tensor | None, groups: Groups, features: int, first: int = 0
    ) -> Tensor | None:
        """[T, features] of the rows with ``keys`` [T], see `Dropout.keep`; None where nothing is dropped."""
        if dropout is None or self.a is None:
            return None
        assert keys is not None
        sites = torch.tensor(self.sites, device=keys.device)
        if len(self.sites) > 1:
            counts = torch.tensor([b - a for a, b in pairwise(groups.bounds)], device=keys.device)
            sites = sites.repeat_interleave(counts)
        return dropout.keep(keys, sites, features, first)

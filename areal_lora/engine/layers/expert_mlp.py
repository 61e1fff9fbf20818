"""All routed experts of a layer with LoRA inside, as one autograd function of grouped matrix products.

It needs nothing but torch and runs on every device. Shapes: T rows sorted by expert, n experts, hidden h, width f::

    g = x W1' + s (d(x) A1') B1'       [T, 2f]   d: dropout, the identity where nothing is trained
    u = silu(g[:, :f]) g[:, f:] p      [T, f]    p: the router's weight of each row
    y = u W2' + s (d(u) A2') B2'       [T, h]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from areal_lora.engine.layers.active import ActiveAdapters, Dropout, kept

ALIGN_BYTES = 16  # torch's grouped matrix product wants rows that start at multiples of this


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of each expert, sorted by expert: expert e has those before ``ends[e]``, [n] int32 on their device.

    Weights are [n, ...], or [...] for all experts. Each product is one launch whatever n is, and none reads ``ends`` on
    the host.
    """

    ends: Tensor

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, out] = x [T, in] times the transposed weight [n, out, in] of each row's expert."""
        if weight.dim() == 2:
            return x @ weight.t()
        if not len(x):
            return x.new_empty(0, weight.shape[1])
        out = functional.grouped_mm(_aligned(x), _aligned(weight, 2).transpose(1, 2), offs=self.ends)
        return out[:, : weight.shape[1]]

    def outer(self, y: Tensor, x: Tensor, like: Tensor) -> Tensor:
        """The gradient of a weight ``like`` [n, out, in]: y [T, out] transposed times x [T, in], per expert."""
        if like.dim() == 2:
            return y.t() @ x
        if not len(x):
            return torch.zeros_like(like)
        grad = functional.grouped_mm(_aligned(y).t(), _aligned(x), offs=self.ends)
        return grad[:, : like.shape[1], : like.shape[2]]


def _aligned(x: Tensor, dims: int = 1) -> Tensor:
    """``x``, its last ``dims`` dimensions filled up with zeros to `ALIGN_BYTES` where a rank or a width is odd."""
    unit = ALIGN_BYTES // x.element_size()
    missing = [-size % unit for size in x.shape[: -dims - 1 : -1]]
    return functional.pad(x, [n for size in missing for n in (0, size)]) if any(missing) else x


@dataclass(frozen=True, slots=True)
class _Part:
    """An adapter's part of a layer: A and B (None: it has none), and what dropout keeps of the inputs [n, in] of its
    ``n`` rows, which are sorted by expert as in ``groups``."""

    groups: Groups
    scale: float
    n: int
    a: Tensor | None
    b: Tensor | None
    keep: Tensor | None

    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """``B A x`` and ``A x`` of its rows ``x``."""
        if self.a is None or self.b is None:
            return None, None
        hidden = self.groups.times(kept(x, self.keep), self.a)
        return self.groups.times(hidden, self.b), hidden

    def backward(self, dy: Tensor, x: Tensor, hidden: Tensor | None) -> tuple[Tensor | None, ...]:
        """Its part of the input's gradient, and the gradients of A and B, from that of the output."""
        if self.a is None or self.b is None:
            return None, None, None
        assert hidden is not None
        dh = self.groups.times(dy, self.b.transpose(-1, -2)).mul_(self.scale)
        back = self.groups.times(dh, self.a.transpose(-1, -2))
        dx = back if self.keep is None else back.masked_fill_(~self.keep, 0.0)
        return dx, self.groups.outer(dh, kept(x, self.keep), self.a), self.groups.outer(dy, hidden * self.scale, self.b)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parts of all adapters in use. ``order`` [T] are their rows, one adapter's after the other's; None: one has
    all rows."""

    parts: Sequence[_Part]
    order: Tensor | None

    @property
    def adapted(self) -> bool:
        return any(part.a is not None for part in self.parts)

    def _rows(self, x: Tensor) -> Sequence[Tensor]:
        if self.order is None:
            return (x,)
        rows: Sequence[Tensor] = x.index_select(0, self.order).split([part.n for part in self.parts])
        return rows

    def _add(self, total: Tensor, products: Sequence[Tensor | None], scales: Sequence[float]) -> None:
        """Add each adapter's products, times its scale."""
        if self.order is None:
            total.add_(products[0], alpha=scales[0])  # one launch less than a product with the scale
            return
        each = zip(self.parts, products, scales, strict=True)
        filled = [total.new_zeros(p.n, total.shape[1]) if found is None else found.mul_(by) for p, found, by in each]
        total.index_add_(0, self.order, torch.cat(filled))

    def forward(self, total: Tensor, x: Tensor) -> list[Tensor | None]:
        """Add the adapters' products for the inputs ``x`` to ``total``; returns ``A x`` of each."""
        if not self.adapted:
            return [None for _ in self.parts]
        found = [part.forward(rows) for part, rows in zip(self.parts, self._rows(x), strict=True)]
        self._add(total, [product for product, _ in found], [part.scale for part in self.parts])
        return [hidden for _, hidden in found]

    def backward(self, dy: Tensor, dx: Tensor, x: Tensor, hidden: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Add the adapters' parts to the inputs' gradient ``dx``; returns the gradients of the parts' tensors."""
        if not self.adapted:
            return [None] * (3 * len(self.parts))
        rows = zip(self.parts, self._rows(dy), self._rows(x), hidden, strict=True)
        found = [part.backward(*each) for part, *each in rows]
        self._add(dx, [each[0] for each in found], [1.0] * len(found))
        return [gradient for _, d_a, d_b in found for gradient in (d_a, d_b, None)]


class ExpertMlp(torch.autograd.Function):  # type: ignore[misc]
    """The module's formulas. Base weights are constants.

    ``parts`` are groups, scale and rows of each `_Part`, first those of layer 1 of all adapters in use, then those of
    layer 2; ``tensors`` are A, B and what dropout keeps. ``order`` as in `_Layer`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        w1: Tensor,
        w2: Tensor,
        groups: Groups,
        order: Tensor | None,
        parts: Sequence[tuple[Groups, float, int]],
        *tensors: Tensor | None,
    ) -> Tensor:
        first, second = _layers(parts, tensors, order)
        g = groups.times(x, w1)
        h1 = first.forward(g, x)
        gate, up = g.chunk(2, dim=-1)
        act = functional.silu(gate).mul_(up)
        u = act * probs[:, None]
        y = groups.times(u, w2)
        h2 = second.forward(y, u)
        ctx.save_for_backward(x, probs, w1, w2, g, act, order, *h1, *h2, *tensors)
        ctx.groups, ctx.parts = groups, parts
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), groups, n = grads, ctx.groups, len(ctx.parts) // 2
        x, probs, w1, w2, g, act, order, *others = ctx.saved_tensors
        first, second = _layers(ctx.parts, others[2 * n :], order)
        dy = dy.contiguous()
        du = groups.times(dy, w2.transpose(1, 2))
        d2 = second.backward(dy, du, act * probs[:, None] if second.adapted else act, others[n : 2 * n])
        d_probs = (du * act).sum(-1)
        du.mul_(probs[:, None])
        gate, up = g.chunk(2, dim=-1)
        dg = torch.empty_like(g)
        d_gate, d_up = dg.chunk(2, dim=-1)
        torch.mul(du, functional.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(du.mul_(up), gate))
        dx = groups.times(dg, w1.transpose(1, 2))
        d1 = first.backward(dg, dx, x, others[:n])
        return dx, d_probs, None, None, None, None, None, *d1, *d2


def _layers(
    parts: Sequence[tuple[Groups, float, int]], tensors: Sequence[Tensor | None], order: Tensor | None
) -> tuple[_Layer, _Layer]:
    each, n = [_Part(*part, *tensors[3 * i : 3 * i + 3]) for i, part in enumerate(parts)], len(parts) // 2
    return _Layer(each[:n], order), _Layer(each[n:], order)


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """One adapter's part: stacks ``a`` [n, r, in] and ``b`` [n, out, r], or one [r, in], [out, r] of all experts.

    They have the type of the layer's inputs.

    ``sites`` int64, on their device, are the numbers of the experts' sites (`site_key`), one each or one of all.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    sites: Tensor | None = None

    def keep(
        self, dropout: Dropout | None, keys: Tensor | None, groups: Groups, features: int, first: int = 0
    ) -> Tensor | None:
        """[T, features] of the rows with ``keys`` [T], see `Dropout.keep`; None where nothing is dropped."""
        if dropout is None or self.a is None:
            return None
        assert keys is not None
        assert self.sites is not None
        sites = self.sites
        if len(sites) > 1:
            sites = sites.repeat_interleave(groups.ends.diff(prepend=groups.ends.new_zeros(1)), output_size=len(keys))
        return dropout.keep(keys, sites, features, first)


def expert_mlp(
    x: Tensor,
    probs: Tensor,
    loras: Sequence[tuple[ExpertLora, ExpertLora]],
    weights: tuple[Tensor, Tensor],
    ends: Tensor,
    active: ActiveAdapters,
    keys: Tensor | None,
    owners: tuple[Tensor, Sequence[int]] | None = None,
    first_column: int = 0,
) -> Tensor:
    """`ExpertMlp` of rows ``x`` [T, h], with the parts ``loras`` of the adapters in use; ``ends`` [n] as in `Groups`.

    ``keys`` [T] are the rows' where inputs are dropped, ``owners`` [T] the numbers of the adapters, and how many rows
    each has, where several are in use; this rank has columns from ``first_column`` on.
    """
    groups, (w1, w2), each, order = Groups(ends), weights, active.each, None
    own, sizes = [groups] * len(each), [len(x)] * len(each)
    if owners is not None:
        order, sizes, whole = owners[0].argsort(stable=True), list(owners[1]), ends.long()
        own = [Groups(torch.searchsorted(rows, whole, out_int32=True)) for rows in order.split(sizes)]
        keys = None if keys is None else keys.index_select(0, order)
    by_adapter = (None,) * len(each) if keys is None else keys.split(sizes)
    parts, tensors = list[tuple[Groups, float, int]](), list[Tensor | None]()
    for layer, (features, first) in enumerate(((x.shape[1], 0), (w2.shape[2], first_column))):
        for adapter, pair, its, n, of_rows in zip(each, loras, own, sizes, by_adapter, strict=True):
            lora = pair[layer]
            parts.append((its, lora.scale * adapter.factor, n))
            tensors += [lora.a, lora.b, lora.keep(adapter.dropout, of_rows, its, features, first)]
    found: Tensor = ExpertMlp.apply(x, probs.to(x.dtype), w1, w2, groups, order, parts, *tensors)
    return found

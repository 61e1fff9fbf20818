"""All routed experts of a layer with LoRA inside, as one autograd function of grouped matrix products.

It needs nothing but torch and runs on every device. Shapes: T rows sorted by expert, n experts, hidden h, width f::

    g = x W1' + s (d(x) A1') B1'       [T, 2f]   d: dropout, the identity where nothing is trained
    u = silu(g[:, :f]) g[:, f:] p      [T, f]    p: the router's weight of each row
    y = u W2' + s (d(u) A2') B2'       [T, h]

With several adapters in use an expert's rows are sorted by adapter, A and B are stacked by expert and adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from areal_lora.engine.layers.active import ActiveAdapters, PackedTokens, kept
from areal_lora.engine.layers.grouped_lora import Groups, add_gradients, gradients, stacked, times_scale


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The adapters' part of a layer: A and B of each (None: it has none), their rows by (expert, adapter), and what
    multiplies their products: one number, or those of each row [T, 1]."""

    groups: Groups
    scale: float | Tensor
    a: Sequence[Tensor | None]
    b: Sequence[Tensor | None]

    @property
    def adapted(self) -> bool:
        return any(part is not None for part in self.a)

    def _weights(self) -> tuple[Tensor, Tensor, int]:
        """A and B by (expert, adapter), and the number of experts."""
        experts = len(self.groups.ends) // len(self.a)
        columns = [None if part is None else part.transpose(-1, -2) for part in self.b]
        return stacked(self.a, experts), stacked(columns, experts).transpose(-1, -2), experts

    def forward(self, total: Tensor, x: Tensor, keep: Tensor | None) -> Tensor | None:
        """Add the products for the inputs ``x``, of which dropout keeps ``keep``, to ``total``; returns ``A x``."""
        if not self.adapted:
            return None
        a, b, _ = self._weights()
        hidden = self.groups.times(kept(x, keep), a)
        product = self.groups.times(hidden, b)
        if isinstance(self.scale, Tensor):
            total.addcmul_(product, self.scale)
        else:
            total.add_(product, alpha=self.scale)  # one launch less than a product with the scale
        return hidden

    def backward(
        self, dy: Tensor, dx: Tensor, x: Tensor, keep: Tensor | None, hidden: Tensor | None, factor: Tensor | None
    ) -> None:
        """Add the adapters' parts to the inputs' gradient ``dx``, and the gradients of A and B to theirs.

        The inputs are ``x`` times ``factor`` [T, 1], which multiplies r numbers of a row instead of all of x.
        """
        if hidden is None:
            return
        (a, b, experts), groups = self._weights(), self.groups
        dh = groups.times(dy, b.transpose(-1, -2)).mul_(self.scale)
        dx.add_(kept(groups.times(dh, a.transpose(-1, -2)), keep))
        dh = dh if factor is None else dh.mul_(factor)
        add_gradients(groups.outer(dh, kept(x, keep), a), gradients(self.a), experts)
        add_gradients(groups.outer(dy, times_scale(hidden, self.scale), b), gradients(self.b), experts)


class ExpertMlp(torch.autograd.Function):  # type: ignore[misc]
    """The module's formulas. Base weights are constants; the gradients of A and B are added to their ``grad``.

    ``shares`` and ``keeps`` are those of the two layers; ``weights`` are A and B once more, for autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        w1: Tensor,
        w2: Tensor,
        groups: Groups,
        shares: tuple[ExpertShare, ExpertShare],
        *keeps_and_weights: Tensor | None,
    ) -> Tensor:
        (first, second), (k1, k2, *_) = shares, keeps_and_weights
        g = groups.times(x, w1)
        h1 = first.forward(g, x, k1)
        gate, up = g.chunk(2, dim=-1)
        act = functional.silu(gate).mul_(up)
        u = act * probs[:, None]
        y = groups.times(u, w2)
        h2 = second.forward(y, u, k2)
        ctx.save_for_backward(x, probs, w1, w2, g, act, h1, h2, k1, k2)
        ctx.groups, ctx.shares, ctx.more = groups, shares, len(keeps_and_weights)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), groups, (first, second) = grads, ctx.groups, ctx.shares
        x, probs, w1, w2, g, act, h1, h2, k1, k2 = ctx.saved_tensors
        dy = dy.contiguous()
        du = groups.times(dy, w2.transpose(1, 2))
        second.backward(dy, du, act, k2, h2, probs[:, None])
        gate, up = g.chunk(2, dim=-1)
        dg = torch.empty_like(g)
        d_gate, d_up = dg.chunk(2, dim=-1)
        d_probs = torch.mul(du, act, out=d_up).sum(-1)
        du.mul_(probs[:, None])
        torch.ops.aten.silu.out(gate, out=d_up).mul_(du)
        torch.ops.aten.silu_backward.grad_input(du.mul_(up), gate, grad_input=d_gate)
        dx = groups.times(dg, w1.transpose(1, 2))
        first.backward(dg, dx, x, k1, h1, None)
        return dx, d_probs, *(None for _ in range(4 + ctx.more))


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """One adapter's part: stacks ``a`` [n, r, in] and ``b`` [n, out, r], or one [r, in], [out, r] of all experts.

    They have the type of the layer's inputs, and gradients in place.

    ``sites`` int64, on their device, are the numbers of the experts' sites (`site_key`), one each or one of all.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    sites: Tensor | None = None


def _sites(loras: Sequence[ExpertLora], groups: Groups, n: int) -> Tensor:
    """[n] of the rows, by (expert, adapter)."""
    known = [lora.sites for lora in loras]
    any_known = next(sites for sites in known if sites is not None)
    experts = len(groups.ends) // len(loras)
    each = torch.stack([(any_known if sites is None else sites).expand(experts) for sites in known], dim=1).view(-1)
    return each.repeat_interleave(groups.ends.diff(prepend=groups.ends.new_zeros(1)), output_size=n)


def expert_mlp(
    x: Tensor,
    probs: Tensor,
    loras: Sequence[tuple[ExpertLora, ExpertLora]],
    weights: tuple[Tensor, Tensor],
    ends: Tensor,
    active: ActiveAdapters,
    rows: PackedTokens | None,
    first_column: int = 0,
) -> Tensor:
    """`ExpertMlp` of rows ``x`` [T, h], with the parts ``loras`` of the adapters in use; ``ends`` [n] as in `Groups`.

    ``rows`` are needed where inputs are dropped or several adapters are in use; this rank has columns from
    ``first_column`` on.
    """
    groups, (w1, w2) = Groups(ends), weights
    own = groups if rows is None or rows.ends is None else Groups(rows.ends)
    shares, keeps, used = list[ExpertShare](), list[Tensor | None](), list[Tensor | None]()
    for layer, (features, first) in enumerate(((x.shape[1], 0), (w2.shape[2], first_column))):
        parts = [pair[layer] for pair in loras]
        a, b = [part.a for part in parts], [part.b for part in parts]
        adapted = any(part is not None for part in a)
        shares.append(ExpertShare(own, active.scale([part.scale for part in parts], rows) if adapted else 1.0, a, b))
        dropped = adapted and active.drops
        keeps.append(active.keep(rows, _sites(parts, own, len(x)), features, first) if dropped else None)
        used += [*a, *b]
    found: Tensor = ExpertMlp.apply(x, probs.to(x.dtype), w1, w2, groups, tuple(shares), *keeps, *used)
    return found

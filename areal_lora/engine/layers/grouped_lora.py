"""LoRA in grouped matrix products: one launch each, whatever the number of experts and of adapters in use.

A group has consecutive rows and a matrix of its own: an expert's, an adapter's rows of the packed row, or the rows of
an expert and an adapter. A and B of the adapters in use are stacked when a layer computes, and again in its backward
pass: a stack that is kept would hold every adapter's weights twice. Ranks that are smaller than the largest are filled
up with zeros, and so are adapters without a part in the layer::

    h = d(x) A'    [m, r]      d: dropout, the identity where nothing is trained
    y = s h B'     [m, out]    s: a number of each row

Rows of one group see no number of another one, so an adapter that is not finite spoils no other.
Gradients are added to those of the adapters in one operator, too; with one kernel on GPUs where shapes are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from areal_lora.engine.layers.active import PackedTokens, kept

ALIGN_BYTES = 16  # torch's grouped matrix product wants rows that start at multiples of this
MOST_GROUPS = 1023  # that it takes on GPUs


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of each group: group e has those before ``ends[e]``, [n] int32 on their device.

    Weights are [n, ...], or [...] for all groups. A product of bfloat16 on Hopper and data-centre Blackwell GPUs is one
    launch whatever n is, up to `MOST_GROUPS`, and does not read ``ends`` on the host. In other types and on other
    devices, torch waits for a copy of ``ends`` on the host and launches n products.
    """

    ends: Tensor

    @classmethod
    def of(cls, rows: PackedTokens | None) -> "Groups":
        """Of the rows of several adapters."""
        assert rows is not None
        assert rows.ends is not None
        return cls(rows.ends)

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, out] = x [T, in] times the transposed weight [n, out, in] of each row's group."""
        if weight.dim() == 2:
            return x @ weight.t()
        if not len(x):
            return x.new_empty(0, weight.shape[1])
        out = nn.functional.grouped_mm(_aligned(x), _aligned(weight, 2).transpose(1, 2), offs=self.ends)
        return out[:, : weight.shape[1]]

    def outer(self, y: Tensor, x: Tensor, like: Tensor) -> Tensor:
        """The gradient of a weight ``like`` [n, out, in]: y [T, out] transposed times x [T, in], per group."""
        if like.dim() == 2:
            return y.t() @ x
        if not len(x):
            return torch.zeros_like(like)
        grad = nn.functional.grouped_mm(_aligned(y).t(), _aligned(x), offs=self.ends)
        return grad[:, : like.shape[1], : like.shape[2]]


def _aligned(x: Tensor, dims: int = 1) -> Tensor:
    """``x``, its last ``dims`` dimensions filled up with zeros to `ALIGN_BYTES` where a rank or a width is odd."""
    unit = ALIGN_BYTES // x.element_size()
    missing = [-size % unit for size in x.shape[: -dims - 1 : -1]]
    return nn.functional.pad(x, [n for size in missing for n in (0, size)]) if any(missing) else x


def stacked(parts: Sequence[Tensor | None], experts: int | None = None) -> Tensor:
    """[N, r, width] of the adapters' ``parts`` [r of its own, width...]; None: it has no part.

    With ``experts`` n it is [n * N, r, width] of parts [n, r, width], or [r, width] for all. A single part as it is.
    """
    if len(parts) == 1 and parts[0] is not None:
        return parts[0]
    given = [part if part is None or experts is None else part.expand(experts, *part.shape[-2:]) for part in parts]
    first, dim = next(part for part in given if part is not None), 0 if experts is None else 1
    ranks = [0 if part is None else part.shape[dim] for part in given]
    most = max(ranks) + -max(ranks) % (ALIGN_BYTES // first.element_size())
    pieces = list[Tensor]()
    blank = first.new_zeros(()) if min(ranks) < most else first
    for part, rank in zip(given, ranks, strict=True):
        if part is not None:
            pieces.append(part)
        if rank < most:
            pieces.append(blank.expand(*first.shape[:dim], most - rank, *first.shape[dim + 1 :]))
    return torch.cat(pieces, dim).view((experts or 1) * len(parts), most, -1)


def add_gradients(grad: Tensor, to: Sequence[Tensor | None], experts: int = 1) -> None:
    """Add the gradient ``grad`` [n * N, a, b] of stacked weights to those of the N adapters, [n, ...] or [...] each.

    Padding is omitted. One operator adds all, in fp32. ``grad`` of a single adapter is as its own.
    """
    if len(to) == 1 and to[0] is not None:
        to[0].add_(grad)
        return
    each = grad.unflatten(0, (experts, len(to))).transpose(0, 1)  # [N, n, a, b]
    each = each.to(torch.float32, memory_format=torch.contiguous_format)
    shared = any(place is not None and place.dim() == 2 for place in to)
    whole = each.sum(1) if shared and experts > 1 else each[:, 0]
    found = [
        ((whole if place.dim() == 2 else each)[i][..., : place.shape[-2], : place.shape[-1]], place)
        for i, place in enumerate(to)
        if place is not None
    ]
    torch._foreach_add_([place for _, place in found], [own for own, _ in found])


def gradients(weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Where the gradients of ``weights`` accumulate; None for what is None."""
    found = [None if weight is None else weight.grad for weight in weights]
    assert all(place is not None for place, weight in zip(found, weights, strict=True) if weight is not None)
    return found


def times_scale(x: Tensor, scale: float | Tensor) -> Tensor:
    """``x`` [m, n] times a number, or numbers [m, 1] in fp32, in the type of ``x``."""
    return torch.mul(x, scale, out=torch.empty_like(x))


class DownProjection(torch.autograd.Function):  # type: ignore[misc]
    """A d(x) of several adapters: [m, r] of ``x`` [m, in] with what dropout keeps of it; ``lora_a`` [r, in] each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, keep: Tensor | None, *lora_a: Tensor | None) -> Tensor:
        ctx.groups, ctx.lora_a = groups, lora_a
        ctx.save_for_backward(x, keep)
        return groups.times(kept(x, keep), stacked(lora_a))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh, (x, keep), groups = grads[0].contiguous(), ctx.saved_tensors, ctx.groups
        weight, none = stacked(ctx.lora_a), (None,) * (2 + len(ctx.lora_a))
        add_gradients(groups.outer(dh, kept(x, keep), weight), gradients(ctx.lora_a))
        if not ctx.needs_input_grad[0]:
            return None, *none
        return kept(groups.times(dh, weight.transpose(1, 2)), keep), *none


def down_projection(x: Tensor, rows: PackedTokens | None, keep: Tensor | None, lora_a: Sequence[Any]) -> Tensor:
    """A d(x) of the adapters in use: [m, r] of ``x`` [m, in]; ``lora_a`` [r, in] each, None without a part."""
    if len(lora_a) == 1:
        return nn.functional.linear(kept(x, keep), *lora_a)
    found: Tensor = DownProjection.apply(x, Groups.of(rows), keep, *lora_a)
    return found


class UpProjection(torch.autograd.Function):  # type: ignore[misc]
    """``scale`` h B' of several adapters: [m, out] of ``hidden`` [m, r] with a scale [m, 1] of each row.

    ``lora_b`` are [runs, rows, r] each, where runs * rows is out; ``grads`` of the same shapes take their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        groups: Groups,
        scale: Tensor,
        lora_b: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> Tensor:
        scaled = times_scale(hidden, scale)
        ctx.groups, ctx.lora_b, ctx.grads = groups, lora_b, grads
        ctx.save_for_backward(scaled, scale)
        return groups.times(scaled, _columns(lora_b))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, (scaled, scale), groups = grads[0].contiguous(), ctx.saved_tensors, ctx.groups
        weight = _columns(ctx.lora_b)
        runs, rows, _ = next(part.shape for part in ctx.lora_b if part is not None)
        places = list[Tensor | None]()
        for part, grad in zip(ctx.lora_b, ctx.grads, strict=True):
            places += [None] * runs if part is None else grad.unbind(0)
        add_gradients(groups.outer(dy, scaled, weight).reshape(len(places), rows, -1), places)
        return groups.times(dy, weight.transpose(1, 2)).mul_(scale), None, None, None, None


def _columns(lora_b: Sequence[Tensor | None]) -> Tensor:
    """[N, out, r]; the rows of B may lie apart in runs."""
    return stacked([None if part is None else part.permute(2, 0, 1) for part in lora_b]).transpose(1, 2)

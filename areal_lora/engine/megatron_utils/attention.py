"""Attention over packed token trees, with rotary positions: the core attention of every layer on every device.

Hidden states are packed [t, 1, ...] without padding between sequences. A *segment* is a run of tokens that attends to
itself causally and to one shared start before it, if it has one (`data.packing`)::

    tokens        p0 p1 p2 | a3 a4 | b3          positions restart in every branch
    a4 attends    p0 p1 p2   a3 a4

Segments of similar length form a block [m, a] of padded queries and [m, p + a] keys. Only attention sees this
padding. Megatron's own layers take a mask [s, s] or need Transformer Engine for packed sequences, and neither knows
branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SPREAD = 2  # a block's longest segment, in multiples of its shortest


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [begin, begin + own) of the packed ones, after the shared tokens [start, start + shared)."""

    begin: int
    own: int
    start: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Segments of similar length, padded. ``queries`` [m, a] and ``keys`` [m, p + a] are packed token numbers.

    ``mask`` [m, 1, a, p + a] is True where attention is allowed; None for causal attention, which suffices without
    shared starts: padding follows the tokens of a row. ``kept`` are the numbers of the real queries in m * a.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    kept: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One micro-batch's attention. ``order`` [t]: the row of each token among the blocks' real queries.

    Padding at the end has the number of the row of zeros behind them.
    """

    blocks: tuple[Block, ...]
    order: Tensor
    positions: Tensor  # [t] int64

    @classmethod
    def of(cls, segments: Sequence[Segment], n_tokens: int, device: torch.device) -> AttentionPlan:
        """Plan the attention of ``segments`` within ``n_tokens`` packed tokens."""
        host = torch.device("cpu")
        positions = torch.zeros(n_tokens, dtype=torch.int64, device=host)
        order = torch.full((n_tokens,), sum(s.own for s in segments), dtype=torch.int64, device=host)
        blocks, row = [], 0
        for group in _similar(segments):
            blocks.append(_block(group, device))
            for s in group:
                positions[s.begin : s.begin + s.own] = torch.arange(s.shared, s.shared + s.own, device=host)
                order[s.begin : s.begin + s.own] = torch.arange(row, row + s.own, device=host)
                row += s.own
        return cls(blocks=tuple(blocks), order=order.to(device), positions=positions.to(device))


def _similar(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group segments with and without a shared start, each by length."""
    groups: list[list[Segment]] = []
    for s in sorted(segments, key=lambda s: (s.shared > 0, -s.own, s.begin)):
        first = groups[-1][0] if groups else None
        if first is None or (first.shared > 0) != (s.shared > 0) or first.own > SPREAD * s.own:
            groups.append([])
        groups[-1].append(s)
    return groups


def _block(group: Sequence[Segment], device: torch.device) -> Block:
    host = torch.device("cpu")
    own = torch.tensor([s.own for s in group], device=host)[:, None]
    begin = torch.tensor([s.begin for s in group], device=host)[:, None]
    shared = torch.tensor([s.shared for s in group], device=host)[:, None]
    start = torch.tensor([s.start for s in group], device=host)[:, None]
    a, p = int(own.max()), int(shared.max())
    columns, before = torch.arange(a, device=host), torch.arange(p, device=host)
    real = columns < own  # [m, a]
    queries = torch.where(real, begin + columns, begin)
    keys = torch.cat([torch.where(before < shared, start + before, begin), queries], dim=1)
    mask = None
    if p:
        causal = columns[None, :, None] >= columns[None, None, :]
        visible = (before < shared)[:, None, :].expand(-1, a, -1)
        mask = torch.cat([visible, causal.expand(len(group), -1, -1)], dim=2)[:, None].to(device)
    kept = real.reshape(-1).nonzero()[:, 0]
    return Block(queries=queries.to(device), keys=keys.to(device), mask=mask, kept=kept.to(device))


class Rotary:
    """Rotary embedding (Su et al., arXiv 2104.09864) of heads of width d, from its d / 2 inverse frequencies, fp32."""

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype) -> None:
        self._inv_freq, self._dtype = inv_freq, dtype
        unit = torch.eye(inv_freq.numel(), device=inv_freq.device, dtype=dtype)
        zero = torch.zeros_like(unit)
        # x @ swap = (-second half, first half)
        self.swap = torch.cat([torch.cat([zero, unit], dim=1), torch.cat([-unit, zero], dim=1)])  # [d, d]

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [t, 1, d] of ``positions`` [t]."""
        angles = torch.outer(positions.float(), self._inv_freq)
        both = torch.cat([angles, angles], dim=-1)[:, None]
        return both.cos().to(self._dtype), both.sin().to(self._dtype)


class _Rotate(torch.autograd.Function):  # type: ignore[misc]
    """``x cos + swap(x) sin`` of x [t, h, d]; cos and sin [t, 1, d] are constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, swap: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, swap)
        return torch.addcmul(x * cos, x @ swap, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,), (cos, sin, swap) = grads, ctx.saved_tensors
        return (grad * cos).add_((grad * sin) @ swap.t()), None, None, None


class Packing:
    """The attention plans of the micro-batches in progress; all layers of a model share one object.

    Megatron hands a layer one tensor for attention, in the forward pass and when it recomputes it: the number of the
    micro-batch.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._plans: dict[int, tuple[AttentionPlan, Tensor, Tensor]] = {}

    def add(self, plan: AttentionPlan) -> Tensor:
        """Hold ``plan`` until :meth:`clear`; the result is the ``attention_mask`` for Megatron."""
        number = len(self._plans)
        self._plans[number] = (plan, *self._rotary.tables(plan.positions))
        return torch.tensor([number], device=torch.device("cpu"))

    def clear(self) -> None:
        self._plans.clear()

    def plan(self, number: Tensor) -> AttentionPlan:
        return self._plans[int(number)][0]

    def rotate(self, number: Tensor, x: Tensor) -> Tensor:
        _, cos, sin = self._plans[int(number)]
        rotated: Tensor = _Rotate.apply(x, cos, sin, self._rotary.swap)
        return rotated


class PackedAttention(nn.Module):  # type: ignore[misc]
    """Megatron's ``core_attention``: query [t, 1, h, d], key and value [t, 1, g, d] to context [t, 1, h * d]."""

    def __init__(self, config: Any, *_: object, softmax_scale: float | None = None, **__: object) -> None:
        super().__init__()
        self._scale = softmax_scale
        self.packing: Packing | None = None  # set once the model is built

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object) -> Tensor:
        assert self.packing is not None
        plan = self.packing.plan(attention_mask)
        query = self.packing.rotate(attention_mask, query[:, 0])
        key = self.packing.rotate(attention_mask, key[:, 0])
        n, heads, width = query.shape
        flat_q, flat_k, flat_v = query.reshape(n, -1), key.reshape(n, -1), value.reshape(n, -1)
        parts = [self._attend(block, flat_q, flat_k, flat_v, heads, width) for block in plan.blocks]
        parts.append(flat_q.new_zeros(1, heads * width))
        return torch.cat(parts).index_select(0, plan.order)[:, None]

    def _attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor, heads: int, width: int) -> Tensor:
        m, a = block.queries.shape

        def rows(x: Tensor, index: Tensor) -> Tensor:
            return x.index_select(0, index.reshape(-1)).view(m, index.shape[1], -1, width).transpose(1, 2)

        out = functional.scaled_dot_product_attention(
            rows(query, block.queries),
            rows(key, block.keys),
            rows(value, block.keys),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(m * a, heads * width).index_select(0, block.kept)


def bind(model: nn.Module, packing: Packing) -> None:
    """Give all attention layers of ``model`` the plans of ``packing``."""
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.packing = packing

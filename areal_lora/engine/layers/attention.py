"""Attention over packed token trees: the core attention of every layer of both engines, on every device.

Hidden states are packed [t, 1, ...] without padding between sequences. A *segment* is a run of tokens that attends to
itself causally and to one shared start before it, if it has one (`data.collate`)::

    tokens        p0 p1 p2 | a3 a4 | b3          positions restart in every branch
    a4 attends    p0 p1 p2   a3 a4

Segments of similar length form a block [m, a] of padded queries and [m, p + a] keys. Only attention sees this
padding.

`pack` lays the tokens of a micro-batch's trees out in one row. The model predicts every token of a tree once. A
sequence reads the predictions of its tokens (`to_sequences`), so those of a shared start count once for each of its
sequences, in the loss as in the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from areal_lora.data.collate import MicroPlan, Tree, runs, select
from areal_lora.engine.layers.expert_mlp import text_keys
from areal_lora.types import TrainBatch

SPREAD = 2  # a block's longest segment, in multiples of its shortest


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [start, start + own) of the packed ones, after the shared tokens [shared_start, shared_start + shared)."""

    start: int
    own: int
    shared_start: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
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

    blocks: tuple[AttentionBlock, ...]
    order: Tensor
    positions: Tensor  # [t] int64

    @classmethod
    def of(cls, segments: Sequence[Segment], n_tokens: int, device: torch.device) -> AttentionPlan:
        """Plan the attention of ``segments`` within ``n_tokens`` packed tokens."""
        positions = np.zeros(n_tokens, dtype=np.int64)
        order = np.full(n_tokens, sum(s.own for s in segments), dtype=np.int64)
        blocks, row = [], 0
        for group in _similar(segments):
            blocks.append(_block(group, device))
            start, own, shared = np.array([(s.start, s.own, s.shared) for s in group]).T
            tokens = runs(start, own)
            positions[tokens] = runs(shared, own)
            order[tokens] = np.arange(row, row + len(tokens))
            row += len(tokens)
        return cls(
            blocks=tuple(blocks),
            order=torch.from_numpy(order).to(device),
            positions=torch.from_numpy(positions).to(device),
        )


def _similar(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group segments with and without a shared start, each by length."""
    groups: list[list[Segment]] = []
    for s in sorted(segments, key=lambda s: (s.shared > 0, -s.own, s.start)):
        first = groups[-1][0] if groups else None
        if first is None or (first.shared > 0) != (s.shared > 0) or first.own > SPREAD * s.own:
            groups.append([])
        groups[-1].append(s)
    return groups


def _block(group: Sequence[Segment], device: torch.device) -> AttentionBlock:
    host = torch.device("cpu")
    own = torch.tensor([s.own for s in group], device=host)[:, None]
    start = torch.tensor([s.start for s in group], device=host)[:, None]
    shared = torch.tensor([s.shared for s in group], device=host)[:, None]
    shared_start = torch.tensor([s.shared_start for s in group], device=host)[:, None]
    a, p = int(own.max()), int(shared.max())
    columns, before = torch.arange(a, device=host), torch.arange(p, device=host)
    real = columns < own  # [m, a]
    queries = torch.where(real, start + columns, start)
    keys = torch.cat([torch.where(before < shared, shared_start + before, start), queries], dim=1)
    mask = None
    if p:
        causal = columns[None, :, None] >= columns[None, None, :]
        visible = (before < shared)[:, None, :].expand(-1, a, -1)
        mask = torch.cat([visible, causal.expand(len(group), -1, -1)], dim=2)[:, None].to(device)
    kept = real.reshape(-1).nonzero()[:, 0]
    return AttentionBlock(queries=queries.to(device), keys=keys.to(device), mask=mask, kept=kept.to(device))


def attend(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of every packed token to its own sequence: context [t, h * dv].

    ``query`` [t, h, d], ``key`` [t, g, d], ``value`` [t, g, dv], rotated. ``scale`` is 1 / sqrt(d) by default. With a
    ``window`` a token sees itself and the ``window - 1`` tokens before it.
    """
    heads, n = query.shape[1], query.shape[0]
    flat = (query.reshape(n, -1), key.reshape(n, -1), value.reshape(n, -1))
    widths = (query.shape[2], key.shape[2], value.shape[2])
    parts = [_attend(block, flat, widths, scale, _mask(plan, block, window)) for block in plan.blocks]
    padding = query.new_zeros(1, heads * widths[2])
    if not parts:  # also a rank of padding only goes backward through the layer: FSDP's collectives follow that order
        padding = padding + 0.0 * sum(x[:1].sum() for x in flat)
    return torch.cat([*parts, padding]).index_select(0, plan.order)


def _attend(
    block: AttentionBlock,
    flat: tuple[Tensor, Tensor, Tensor],
    widths: tuple[int, int, int],
    scale: float | None,
    mask: Tensor | None,
) -> Tensor:
    queries, keys, values = (
        x.index_select(0, index.reshape(-1)).view(*index.shape, -1, width).transpose(1, 2)
        for x, width, index in zip(flat, widths, (block.queries, block.keys, block.keys), strict=True)
    )
    out = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    m, a = block.queries.shape
    return out.transpose(1, 2).reshape(m * a, -1).index_select(0, block.kept)


def _mask(plan: AttentionPlan, block: AttentionBlock, window: int | None) -> Tensor | None:
    """``block.mask``, narrowed to a sliding window."""
    if window is None:
        return block.mask
    queries, keys = plan.positions[block.queries], plan.positions[block.keys]
    near = queries[:, :, None] - keys[:, None, :] < window
    if block.mask is not None:
        return block.mask & near[:, None]
    columns = torch.arange(queries.shape[1], device=queries.device)
    return (near & (columns[:, None] >= columns))[:, None]


PAD_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch:
    """One rank's micro-batch of n tokens in trees, padded to t, with p predictions.

    Prediction k is how likely ``targets[k]`` is after token ``sources[k]``. ``index`` [tokens of ``micro``] is each
    token's prediction; p for the first token of a sequence, which has none.
    """

    micro: TrainBatch | None  # None: a micro-batch of padding, computed for the collectives only
    sequences: tuple[int, ...]
    token_ids: Tensor  # [1, t] int64
    keys: Tensor  # [t] int64, see `dropout.text_keys`; 0 for padding
    attention: AttentionPlan
    sources: Tensor  # [p] int64
    targets: Tensor  # [p] int64
    index: Tensor  # int64


def pack(batch: TrainBatch, plan: MicroPlan, dp_rank: int, device: torch.device) -> PackedMicroBatch:
    """Lay out this data-parallel rank's trees of one micro-batch."""
    trees = plan.trees[dp_rank]
    sequences = tuple(i for tree in trees for i in tree.sequences)
    micro = select(batch, sequences) if sequences else None
    row, keys = np.full(plan.n_tokens, PAD_ID, dtype=np.int64), np.zeros(plan.n_tokens, dtype=np.int64)
    before = where = np.empty(0, dtype=np.int64)
    segments: list[Segment] = []
    if micro is not None:
        segments, origins, reads = _segments(trees, micro.cu_seqlens.tolist())
        start, own, shared_start, shared = np.array([(s.start, s.own, s.shared_start, s.shared) for s in segments]).T
        held = runs(np.array(origins), own)  # the token of ``micro`` that each token of the row is
        tokens = micro.token_ids.numpy()
        row[: len(held)] = tokens[held]
        keys[: len(held)] = text_keys(tokens, micro.cu_seqlens[:-1].numpy())[held]
        before = np.arange(-1, len(held) - 1)  # the token before each token of the row, -1 at a start
        before[start] = np.where(shared > 0, shared_start + shared - 1, -1)
        where = runs(*np.array(reads).T)  # the row's token of each token of the sequences
    predicted = before >= 0
    sources, targets = before[predicted], row[: len(before)][predicted]
    number = np.full(len(before), len(sources))  # the prediction of each token of the row, p where it has none
    number[predicted] = np.arange(len(sources))
    return PackedMicroBatch(
        micro=None if micro is None else to_device(micro, device),
        sequences=sequences,
        token_ids=torch.from_numpy(row)[None].to(device),
        keys=torch.from_numpy(keys).to(device),
        attention=AttentionPlan.of(segments, plan.n_tokens, device),
        sources=torch.from_numpy(sources).to(device),
        targets=torch.from_numpy(targets).to(device),
        index=torch.from_numpy(number[where]).to(device),
    )


def _segments(trees: Sequence[Tree], bounds: Sequence[int]) -> tuple[list[Segment], list[int], list[tuple[int, int]]]:
    """Start (if shared) and branches of each tree, one after the other, and where their tokens come from and go to.

    Sequence i of the trees, in order, has tokens ``bounds[i]:bounds[i + 1]``. The second list holds the first of them
    for each segment, the third what each sequence reads: (first token in the row, number) of shared start and branch.
    """
    segments: list[Segment] = []
    origins: list[int] = []
    reads: list[tuple[int, int]] = []
    at = number = 0
    for tree in trees:
        shared_start, n = at, tree.shared
        if n:
            segments.append(Segment(start=at, own=n))
            origins.append(bounds[number])
            at += n
        for _ in tree.sequences:
            own = bounds[number + 1] - bounds[number] - n
            segments.append(Segment(start=at, own=own, shared_start=shared_start, shared=n))
            origins.append(bounds[number] + n)
            reads += ((shared_start, n), (at, own))
            at, number = at + own, number + 1
    return segments, origins, reads


def to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    moved = {f.name: value.to(device) for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)}
    return replace(batch, **moved)


def to_sequences(values: Tensor, packed: PackedMicroBatch) -> Tensor:
    """Packed [tokens of ``micro``] from predictions [p]; entry 0 of every sequence is 0."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, packed.index)

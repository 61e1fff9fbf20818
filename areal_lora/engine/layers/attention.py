"""Attention over packed token trees: the core attention of every layer of both engines, on every device.

Hidden states are packed [t, 1, ...] without padding between sequences. A *segment* is a run of tokens that attends to
itself causally and to one shared start before it, if it has one (`data.collate`)::

    tokens        p0 p1 p2 | a3 a4 | b3          positions restart in every branch
    a4 attends    p0 p1 p2   a3 a4

Attention is a cascade: a causal pass of each segment over itself, a pass of all branches of a tree over their shared
start, once, and a sum of both by their log-sum-exps. No mask of tokens by tokens is needed, and the start's keys are
read once. Without flash attention, and with context parallelism, it is one pass of each segment over its start and
itself.

`pack` lays the tokens of a micro-batch's trees out in one row. The model predicts every token of a tree that
is on the loss mask once. A sequence reads the predictions of its tokens (`to_sequences`), so those of a shared start
count once for each of its sequences, in the loss as in the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from areal_lora.data.collate import PER_SEQUENCE, MicroPlan, Tree, runs, select
from areal_lora.engine.layers import varlen
from areal_lora.engine.layers.active import PackedTokens, text_keys
from areal_lora.engine.layers.context import ContextGroup
from areal_lora.platforms.device import upload
from areal_lora.types import TrainBatch


class Segment(NamedTuple):
    """Tokens [start, start + own) of the packed ones, after the shared tokens [shared_start, shared_start + shared)."""

    start: int
    own: int
    shared_start: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class AttentionPass:
    """Attention of the tokens ``queries`` over the tokens ``keys`` by ``runs``."""

    runs: varlen.VarlenRuns
    queries: Tensor | slice
    keys: Tensor | slice


class AttentionPlan:
    """One micro-batch's attention: ``segments`` without gaps, then padding up to ``n_tokens``.

    ``positions`` [n_tokens] int64 on ``device`` restart in every sequence. In a ``context`` group they and the queries
    are those of this rank's part of the tokens.
    """

    def __init__(
        self, segments: Sequence[Segment], n_tokens: int, device: torch.device, context: ContextGroup | None = None
    ) -> None:
        self._segments = np.array([(*segment, 0) for segment in segments if segment.own])
        self._segments, self._device = self._segments.reshape(-1, 5).astype(np.int64), device
        self._windows: dict[int | None, AttentionPass] = {}
        start, own, *_ = self._segments.T
        assert np.array_equal(start, own.cumsum() - own), "segments follow each other"
        self.context, self._places = context, np.arange(n_tokens)
        self.empty = not own.sum()  # of this rank's whole group
        if context is not None:
            self._places = context.places(n_tokens)
            self._segments = np.concatenate([_cut(self._segments, *bounds) for bounds in context.parts(n_tokens)])
        start, own, _, shared, before = self._segments.T
        self.n = int(own.sum())
        positions = np.zeros(n_tokens // (context.size if context else 1), dtype=np.int64)
        positions[: self.n] = runs(shared + before, own)
        self.positions = self._upload(positions)

    def _upload(self, numbers: np.ndarray[Any, Any]) -> Tensor:
        return upload(torch.from_numpy(numbers), self._device)

    @cached_property
    def own(self) -> AttentionPass:
        """Each segment over itself."""
        own = self._segments[:, 1]
        return AttentionPass(varlen.VarlenRuns(own, own, self._device), slice(None), slice(None))

    @cached_property
    def shared(self) -> AttentionPass | None:
        """The branches of each tree, one run, over their start; None without trees."""
        branches = self._segments[self._segments[:, 3] > 0]
        if not len(branches):
            return None
        at = np.flatnonzero(np.diff(branches[:, 2], prepend=-1))  # a tree's first branch
        own = np.add.reduceat(branches[:, 1], at)
        start, length = branches[at, 2], branches[at, 3]
        at_runs = varlen.VarlenRuns(own, length, self._device)
        if len(at) == 1:  # a tree of long answers fills a micro-batch: nothing has to be gathered
            rows = slice(int(branches[0, 0]), int(branches[0, 0] + own[0]))
            return AttentionPass(at_runs, rows, slice(int(start[0]), int(start[0] + length[0])))
        queries, keys = runs(branches[:, 0], branches[:, 1]), runs(start, length)
        return AttentionPass(at_runs, self._upload(queries), self._upload(keys))

    def window(self, width: int | None) -> AttentionPass:
        """Each segment over what is before it, as far as the first query sees it (None: all), and itself."""
        if width not in self._windows:
            start, own, shared_start, shared, before = self._segments.T
            seen = shared + before if width is None else np.minimum(shared + before, width - 1)
            near = np.minimum(seen, before)  # of its own part of the sequence
            first = np.stack([shared_start + shared - (seen - near), start - near], axis=1).reshape(-1)
            keys = self._places[runs(first, np.stack([seen - near, near + own], axis=1).reshape(-1))]
            at_runs = varlen.VarlenRuns(own, seen + own, self._device, keys)
            self._windows[width] = AttentionPass(at_runs, slice(None), self._upload(keys))
        return self._windows[width]


def _cut(segments: np.ndarray[Any, Any], first: int, end: int) -> np.ndarray[Any, Any]:
    """The parts of ``segments`` (start, own, shared start, shared, tokens of it before) in tokens [first, end)."""
    start, own, shared_start, shared, before = segments.T
    low, high = np.maximum(start, first), np.minimum(start + own, end)
    parts: np.ndarray[Any, Any] = np.stack([low, high - low, shared_start, shared, before + low - start], axis=1)
    return parts.compress(high > low, axis=0)


def attend(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of every packed token to its own sequence: context [t, h * dv]; that of padding is 0.

    ``query`` [t, h, d], ``key`` [t, g, d], ``value`` [t, g, dv], rotated. ``scale`` is 1 / sqrt(d) by default. With a
    ``window`` a token sees itself and the ``window - 1`` tokens before it.
    """
    d, dv = query.shape[2], value.shape[2]
    scale = d**-0.5 if scale is None else scale
    if plan.context is not None and not plan.empty:
        heads = plan.context.gather(torch.cat([key, value], dim=2))
        key, value = heads.split([d, dv], dim=2)
    if not plan.n:  # a rank of padding only goes backward, too: FSDP's collectives follow that order
        return query.new_zeros(len(query), query.shape[1] * dv) + 0.0 * (query.sum() + key.sum() + value.sum())
    missing, real = len(query) - plan.n, [query, key, value]
    if missing:  # a slice has a launch in the backward pass
        real[:] = query[: plan.n], *(x[: plan.n] if plan.context is None else x for x in (key, value))
    if varlen.has_flash(query):
        if d != dv:  # the kernels have one width
            real = [functional.pad(x, (0, max(d, dv) - x.shape[2])) for x in real]
        context = _Flash.apply(*(x if x.stride(2) == 1 else x.contiguous() for x in real), plan, scale, window)
        context = context if d == dv else context[..., :dv]
    elif window is None and plan.context is None and plan.shared is None:
        context = varlen.padded(plan.own.runs, *real, scale=scale)
    else:
        context = varlen.padded(plan.window(window).runs, *real, scale=scale, window=window)
    return functional.pad(context.flatten(1), (0, 0, 0, missing)) if missing else context.flatten(1)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Heads ``query`` [t, h, d] and ``key`` [t, g, d] at their positions (Su et al., arXiv 2104.09864, in halves).

    ``cos`` and ``sin`` [t, d] of the angles, both halves equal, in the type of the heads.
    """
    rotated: Tensor = _Rotation.apply(torch.cat([query, key], dim=1), cos[:, None], sin[:, None])
    query, key = rotated.split([query.shape[1], key.shape[1]], dim=1)
    return query, key


class _Rotation(torch.autograd.Function):  # type: ignore[misc]
    """x cos + (-x2, x1) sin in three launches; the backward pass is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
        ctx.save_for_backward(cos, sin)
        rotated, half = x * cos, x.shape[-1] // 2
        rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
        rotated[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Rotation.apply(grads[0], *ctx.saved_tensors, -1.0), None, None


class _Flash(torch.autograd.Function):  # type: ignore[misc]
    """`attend` of real tokens of one width, [n, h, d], with a backward pass per part over the whole's log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None
    ) -> Tensor:
        ctx.plan, ctx.scale, ctx.window = plan, scale, window
        ctx.cut = window is not None or plan.context is not None
        at = plan.window(window) if ctx.cut else plan.own
        # Not kept for the backward pass: a common start is taken for each of its branches.
        seen = _take(k, at.keys), _take(v, at.keys)
        out, lse, saved = varlen.forward(at.runs, q, *seen, causal=True, scale=scale, window=window)
        if not ctx.cut and plan.shared:
            at = plan.shared
            parts = _take(q, at.queries), _take(k, at.keys), _take(v, at.keys)
            before, its_lse, more = varlen.forward(at.runs, *parts, causal=False, scale=scale)
            own, own_lse = _take(out, at.queries), _take(lse, at.queries)
            share = (own_lse - its_lse).sigmoid()[..., None].to(out.dtype)  # of the sum of exponentials
            # Not in place: a recomputation may read the kernel's results again.
            out = _put(out, at.queries, torch.lerp(before, own, share))
            lse = _put(lse, at.queries, torch.logaddexp(own_lse, its_lse))
            saved += more
        ctx.save_for_backward(q, k, v, out, lse, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, window, d_out = ctx.plan, ctx.window, grads[0].contiguous()
        q, k, v, out, lse, *saved = ctx.saved_tensors
        how = {"causal": True, "scale": ctx.scale, "window": window}
        at = plan.window(window) if ctx.cut else plan.own
        inputs = q, _take(k, at.keys), _take(v, at.keys)
        dq, dk, dv = varlen.backward(at.runs, d_out, inputs, out, lse, tuple(saved[:2]), **how)
        if ctx.cut:
            dk, dv = (x.new_zeros(len(k), *x.shape[1:]).index_add_(0, at.keys, x) for x in (dk, dv))
        elif plan.shared:
            at = plan.shared
            over, queries, context, sums = (_take(x, at.queries) for x in (d_out, q, out, lse))
            inputs = queries, _take(k, at.keys), _take(v, at.keys)
            how["causal"] = False
            parts = varlen.backward(at.runs, over, inputs, context, sums, tuple(saved[2:]), **how)
            for total, rows, part in zip((dq, dk, dv), (at.queries, at.keys, at.keys), parts, strict=True):
                if isinstance(rows, slice):
                    total[rows] += part
                else:
                    total.index_add_(0, rows, part)
        return dq, dk, dv, None, None, None


def _take(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _put(x: Tensor, rows: Tensor | slice, values: Tensor) -> Tensor:
    if isinstance(rows, slice):
        return torch.slice_scatter(x, values, 0, rows.start, rows.stop)
    return x.index_copy(0, rows, values)


PAD_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch:
    """One rank's micro-batch of n tokens in trees, padded to t, with p predictions.

    Trees and ``sequences`` are sorted by adapter, in the order in which the batch names them. ``micros`` are the
    sequences of each adapter that has any here: none in padding, which is computed for the collectives only.

    Prediction k is how likely ``targets[k]`` is after token ``sources[k]``. ``index`` [tokens of ``micros``] is each
    token's prediction; p for the first of a sequence and off the loss mask, which clients' batches do not use. Where
    tokens have routes, a later one attends to those ``followed``. In a context-parallel group t and p are of this
    rank's part of the row, ``micros`` are whole, and ``index`` counts the predictions of all ranks, one rank after the
    other, each filled up to ``predictions``. ``rows`` [tokens of ``micros``], on the host, is each token's place in the
    row, or in the parts of the group's ranks, one after the other.
    """

    micros: tuple[TrainBatch, ...]
    sequences: tuple[int, ...]
    token_ids: Tensor  # [1, t] int64
    tokens: PackedTokens
    attention: AttentionPlan
    sources: Tensor  # [p] int64
    targets: Tensor  # [p] int64
    kept: Tensor | None  # [p, most] int32; None: predictions are over the whole vocabulary
    index: Tensor  # int64
    predictions: int
    followed: Tensor | None  # int64
    rows: Tensor  # int64


def pack(
    batch: TrainBatch, plan: MicroPlan, dp_rank: int, device: torch.device, context: ContextGroup | None = None
) -> PackedMicroBatch:
    """Lay out this data-parallel rank's trees of one micro-batch, of which it computes its part of the ``context``.

    A shared start has the routes of the first of its sequences.
    """
    adapters = {name: i for i, name in enumerate(dict.fromkeys(batch.adapters))}
    trees = sorted(plan.trees[dp_rank], key=lambda tree: adapters[batch.adapters[tree.sequences[0]]])
    sequences = tuple(i for tree in trees for i in tree.sequences)
    micro = select(batch, sequences) if sequences else None
    assert micro is None or micro.held is None, "a rank lacks tokens of its part"
    row, keys = np.full(plan.n_tokens, PAD_ID, dtype=np.int64), np.zeros(plan.n_tokens, dtype=np.int64)
    owners = np.full(plan.n_tokens, len(adapters) - 1)
    before = where = held = read = np.empty(0, dtype=np.int64)
    _, layers, k = (0, 0, 0) if batch.routes is None else batch.routes.shape
    routes = np.full((plan.n_tokens, layers, k), -1, dtype=np.int16)
    segments: list[Segment] = []
    if micro is not None:
        segments, origins, reads = _segments(trees, micro.cu_seqlens.tolist())
        start, own, shared_start, shared = np.array(segments).T
        held = runs(np.array(origins), own)  # the token of ``micro`` that each token of the row is
        text = micro.token_ids.numpy()
        row[: len(held)] = text[held]
        keys[: len(held)] = text_keys(text, micro.cu_seqlens[:-1].numpy())[held]
        owner = np.array([adapters[name] for name in micro.adapters])
        owners[: len(held)] = owner.repeat(micro.cu_seqlens.diff().numpy())[held]
        if micro.routes is not None:
            np.take(micro.routes.numpy(), held, axis=0, out=routes[: len(held)], mode="clip")  # raise would copy twice
        before = np.arange(-1, len(held) - 1)  # the token before each token of the row, -1 at a start
        before[start] = np.where(shared > 0, shared_start + shared - 1, -1)
        where = runs(*np.array(reads).T)  # the row's token of each token of the sequences
        read = (micro.loss_mask if micro.weights is None else torch.ones_like(micro.loss_mask)).numpy()  # clients: all
    predicted, followed = (before >= 0) & (np.bincount(where[read], minlength=len(held)) > 0), before[before >= 0]
    sources, targets = before[predicted], row[: len(before)][predicted]
    kept = None if (ids := (micro or batch).kept) is None else ids.numpy()[held[predicted]]
    numbers, most = np.arange(len(sources)), len(sources)
    total = most
    if context is not None:
        owner, at = np.divmod(context.places(plan.n_tokens), plan.n_tokens // context.size)
        of = owner[sources]
        most = int(np.bincount(of, minlength=context.size).max())
        mine, total = of == context.rank, most * context.size
        for rank in range(context.size):
            numbers[of == rank] = rank * most + np.arange((of == rank).sum())
        sources, targets, kept = at[sources[mine]], targets[mine], None if kept is None else kept[mine]
        followed = at[followed[owner[followed] == context.rank]]
        own = np.concatenate([np.arange(*bounds) for bounds in context.parts(plan.n_tokens)])
        row, keys, owners, routes = row[own], keys[own], owners[own], routes[own]
    number = np.full(len(before), total)  # the prediction of each token of the row
    number[predicted] = numbers
    tokens = PackedTokens(keys=upload(torch.from_numpy(keys), device))
    if len(adapters) > 1:
        ends = np.searchsorted(owners, range(len(adapters)), side="right").astype(np.int32)
        ends, owners = (upload(torch.from_numpy(numbers), device) for numbers in (ends, owners))
        tokens = replace(tokens, ends=ends, owners=owners)
    if layers:
        tokens = replace(tokens, routes=upload(torch.from_numpy(routes), device))
    both = upload(torch.from_numpy(np.concatenate([sources, followed] if layers else [sources])), device)  # in one copy
    return PackedMicroBatch(
        micros=_by_adapter(to_device(micro, device), micro.cu_seqlens.tolist()) if micro is not None else (),
        sequences=sequences,
        token_ids=upload(torch.from_numpy(row)[None], device),
        tokens=tokens,
        attention=AttentionPlan(segments, plan.n_tokens, device, context),
        sources=both[: len(sources)],
        targets=upload(torch.from_numpy(targets), device),
        kept=None if kept is None else upload(torch.from_numpy(kept), device),
        index=upload(torch.from_numpy(np.where(read, number[where], total)), device),
        predictions=most,
        followed=both[len(sources) :] if layers else None,
        rows=torch.from_numpy(where if context is None else context.places(plan.n_tokens)[where]),
    )


def _by_adapter(micro: TrainBatch, bounds: Sequence[int]) -> tuple[TrainBatch, ...]:
    """The sequences of each adapter, which follow each other, as views; ``bounds`` are ``cu_seqlens`` on the host."""
    found, first = list[TrainBatch](), 0
    for _, each in groupby(micro.adapters):
        last = first + len(list(each))
        rows, tokens = slice(first, last), slice(bounds[first], bounds[last])
        own: dict[str, Any] = {
            f.name: value[rows if f.name in PER_SEQUENCE else tokens]
            for f in fields(micro)
            if isinstance(value := getattr(micro, f.name), Tensor) and f.name != "cu_seqlens"
        }
        cu_seqlens = micro.cu_seqlens[first : last + 1]
        own |= {"cu_seqlens": cu_seqlens - bounds[first] if first else cu_seqlens, "adapters": micro.adapters[rows]}
        found.append(replace(micro, **own))
        first = last
    return tuple(found)


def _segments(trees: Sequence[Tree], bounds: Sequence[int]) -> tuple[list[Segment], list[int], list[tuple[int, int]]]:
    """Start (if shared) and branches of each tree, one after the other, and where their tokens come from and go to.

    Sequence i of the trees, in order, has tokens ``bounds[i]:bounds[i + 1]``. The second list holds the first of them
    for each segment, the third what each sequence reads: (first token in the row, number) of shared start and branch.
    """
    segments, origins, reads = list[Segment](), list[int](), list[tuple[int, int]]()
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
    """All tensors that a loss reads; common starts, routes and kept ids are for `pack`, and stay on the host."""
    host = "only", "shared_starts", "routes", "old_routes", "kept"
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name not in host}
    return replace(
        batch, **{name: upload(value, device) for name, value in values.items() if isinstance(value, Tensor)}
    )


def to_sequences(values: Tensor, packed: PackedMicroBatch) -> Tensor:
    """Packed [tokens of ``micros``] from predictions [p]; 0 for tokens without one."""
    if (context := packed.attention.context) is not None:
        values = context.gather(functional.pad(values, (0, packed.predictions - len(values))), equal=True)
    return torch.cat([values, values.new_zeros(1)]).index_select(0, packed.index)

"""What every engine does with a batch around its model: cut it up, judge the predictions, put the results together."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.config.sections.run import Recompute
from areal_lora.data.collate import HOST, MicroPlan, find_trees, groups_of_starts, plan_microbatches, split_minibatches
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.layers.attention import PackedMicroBatch, to_sequences
from areal_lora.engine.layers.context import ZIGZAGS, ContextGroup
from areal_lora.engine.layers.output import Readout
from areal_lora.errors import AlignmentError
from areal_lora.families.sites import PassSizes
from areal_lora.types import TrainBatch

Result = tuple[tuple[int, ...], Mapping[str, float | Tensor], Tensor]
"""Sequences of one adapter in a micro-batch, the sums of its loss function (empty without one), the scores: [t], or
[t, 2] with entropies.

Nothing else of a micro-batch outlives its passes: masks and activations of all together are many times those of one.
"""

LAUNCHES = 1024
"""Tokens of one device that take as long as the launches of a micro-batch: 70 to 1,800 by `docs/tools/sizes.py`."""


def plans_of(batch: TrainBatch, layout: ParallelLayout, token_budget: int) -> list[MicroPlan]:
    """The micro-batches of a pass over ``batch``, equal on every rank. Starts are shared within a group and adapter.

    Pipeline stages wait as long as (pp - 1) / c micro-batches take, with c virtual ones a rank (Narayanan et al.,
    arXiv 2104.04473, section 2.2). So with pp the budget falls by fifths while they wait for more than an eighth of
    their micro-batches and these get smaller; the plan is that of the least time. ``batch.only`` does not change where
    sequences are computed: ranks have the tokens of their `parts_of` alone. Sequences without a gradient have
    micro-batches of their own, the last ones, if a training pass takes less time so.
    """
    lengths = batch.cu_seqlens.diff().tolist()
    of = zip(batch.group_ids.tolist(), batch.adapters, strict=True)
    shared = batch.shared_starts.numpy() * [False, *(a == b for a, b in pairwise(of))]
    trees = find_trees(lengths, shared.tolist(), groups_of_starts(shared).tolist())
    waits, row_ranks = (layout.pp - 1) * layout.pp / len(layout.stage_layers), layout.tp * layout.cp

    zero = [False] * len(lengths) if batch.zero_advantage is None else batch.zero_advantage.tolist()
    idle = [all(zero[i] for i in tree.sequences) for tree in trees]

    def plan(token_budget: int, apart: bool, only: Tensor | None = None) -> list[MicroPlan]:
        return [
            replace(each, gradient=gradient)
            for gradient in ((True, False) if apart else (True,))
            for each in plan_microbatches(
                [tree for tree, without in zip(trees, idle, strict=True) if not apart or gradient != without],
                lengths,
                dp=layout.dp,
                token_budget=token_budget,
                multiple=int(np.lcm(layout.chunk * layout.tp, 1 if layout.cp == 1 else 2 * ZIGZAGS)) * layout.cp,
                uniform=layout.pp > 1,
                rounds=layout.pp if len(layout.stage_layers) > layout.pp else 1,
                only=None if only is None else only.tolist(),
            )
        ]

    def time(plans: list[MicroPlan]) -> float:
        """Of a training pass, in tokens of a forward one; a backward pass takes as long as two."""
        total = 0.0
        for part in runs_of(plans, train=True):
            sizes = [plan.n_tokens + LAUNCHES * row_ranks for plan in part]
            total += (sum(sizes) + waits * sizes[0]) * (3 if part[0].gradient else 1)
        return total

    def fitted(apart: bool) -> tuple[list[MicroPlan], int, bool]:
        chosen = budget = token_budget * layout.cp
        best = last = plan(budget, apart)
        while last and waits > len(last) / 8:
            frame = last[0].n_tokens
            budget = frame - frame // 5
            last = plan(budget, apart)
            if time(last) < time(best):
                best, chosen = last, budget
            if last[0].n_tokens >= frame:  # that of one sequence
                break
        return best, chosen, apart

    found = map(fitted, (False, True) if any(idle) else (False,))
    best, chosen, apart = min(found, key=lambda each: time(each[0]))
    return best if batch.only is None else plan(chosen, apart, batch.only)


def runs_of(plans: list[MicroPlan], *, train: bool, uniform: bool = False) -> list[list[MicroPlan]]:
    """The micro-batches that a model computes in one go: a training pass those with a gradient, then the others.

    A scoring pass computes all, of one size if they are ``uniform``.
    """
    if train:
        return [list(part) for _, part in groupby(plans, key=lambda plan: plan.gradient)]
    frame = max((plan.n_tokens for plan in plans), default=0)
    return [[replace(plan, n_tokens=frame) for plan in plans] if uniform else plans]


def of_stage(batch: TrainBatch, model: ShardedModel, rank: int) -> TrainBatch:
    """``batch`` with the routes of the layers of this rank's stage alone; views, unless it has several virtual stages.

    Raises AlignmentError for routes that are not of the model's layers and experts.
    """
    if batch.routes is None:
        return batch
    shape, (_, *found) = model.shape, batch.routes.shape
    wanted = [shape.moe_layers, shape.experts_per_token]
    low, high = map(int, batch.routes.aminmax()) if batch.routes.numel() else (-1, -1)
    if found != wanted or low < -1 or high >= shape.experts:
        raise AlignmentError(
            f"routes of {found} layers and experts a token, {low} to {high}: the model has {wanted} of {shape.experts} "
            "experts; serve the model that is trained"
        )
    routes = [batch.routes[:, first:end] for first, end in routed_layers(model, rank)]
    return replace(batch, routes=routes[0] if len(routes) == 1 else torch.cat(routes, 1))


def routed_layers(model: ShardedModel, rank: int) -> list[tuple[int, int]]:
    """First and end of each virtual stage of ``rank`` among the layers with experts."""
    layers, chunks = model.shape.sparse_layers, model.layout.chunks_of(rank)
    return [(bisect_left(layers, own.start), bisect_left(layers, own.stop)) for own in chunks]


def flops_of(
    plans: Sequence[MicroPlan], batch: TrainBatch, sizes: Mapping[str, PassSizes], recompute: Recompute | None
) -> Counter[str]:
    """``flops`` and ``recomputed_flops`` of a pass, ``sizes`` by adapter; one that only scores has no ``recompute``.

    The output layer computes those of tokens on the loss mask, or of clients: `layers.attention.pack`.
    """
    lengths, counts, starts = batch.cu_seqlens.diff().tolist(), Counter[str](), batch.cu_seqlens.tolist()
    mask = np.ones(batch.n_tokens, np.bool_) if batch.weights is not None else batch.loss_mask.numpy()
    passes = [(recompute if plan.gradient else None, tree) for plan in plans for trees in plan.trees for tree in trees]
    for how, tree in passes:
        of, tokens, pairs = sizes[batch.adapters[tree.sequences[0]]], tree.size(lengths), tree.pairs(lengths)
        own = [mask[starts[i] : starts[i + 1]] for i in tree.sequences]
        shared = np.logical_or.reduce([each[: tree.shared] for each in own])
        read = int(shared.sum()) + sum(int(each[tree.shared :].sum()) for each in own)
        counts["flops"] += of.forward(tokens, pairs, read) if how is None else of.training(tokens, pairs, read)
        if how not in (None, "none"):
            counts["recomputed_flops"] += of.recompute(tokens, 0 if how == "selective" else pairs)
    return counts


def parts_of(batch: TrainBatch, minibatches: int, layout: ParallelLayout, token_budget: int) -> np.ndarray:
    """[dp, N] bool: the sequences that each data-parallel rank computes in passes over batch and minibatches."""
    parts = split_minibatches(batch, minibatches)
    held: np.ndarray = np.concatenate(
        [computed_by(plans_of(each, layout, token_budget), each, layout) for each in parts], axis=1
    )
    return held if minibatches == 1 else held | parts_of(batch, 1, layout, token_budget)


def computed_by(plans: Sequence[MicroPlan], batch: TrainBatch, layout: ParallelLayout) -> np.ndarray:
    """[dp, N] bool: the sequences that each data-parallel rank computes."""
    found = np.zeros((layout.dp, batch.n_sequences), np.bool_)
    for plan in plans:
        for rank, trees in enumerate(plan.trees):
            found[rank, [i for tree in trees for i in tree.sequences]] = True
    return found


@dataclass(frozen=True, slots=True)
class BatchJudge:
    """What a pass reads of the model, and makes of it on the last pipeline stage for each of its micro-batches."""

    readout: Readout
    losses: Mapping[str, LossFn] | None
    """By adapter."""

    def __call__(self, packed: PackedMicroBatch, output: Tensor) -> tuple[Tensor, list[Result]]:
        """Scalar to differentiate, and the results, without grad: one for each adapter that has sequences.

        ``output`` [p, 1 or 2] is that of an `OutputSite`. The sums are those of ``losses`` plus ``loss``; there are
        none without them.
        """
        scores, *entropy = (to_sequences(column, packed) for column in output.unbind(1))
        if self.losses is None:
            return scores.sum(), [(packed.sequences, {}, scores.detach())]
        # Every rank's graph stays alive even if no token of this micro-batch is on the mask, or it is padding only: the
        # backward pass must still run, its collectives are shared with other ranks.
        loss, results, first = output.sum() * 0.0, list[Result](), 0
        tokens = [micro.n_tokens for micro in packed.micros]
        cut = [[x] if len(tokens) == 1 else x.split(tokens) for x in (scores, *entropy) if tokens]
        for micro, *columns in zip(packed.micros, *cut, strict=True):
            sums = self.losses[micro.adapters[0]](micro, columns[0], columns[1] if entropy else None)
            loss = sums.loss + loss
            sequences = packed.sequences[first : first + micro.n_sequences]
            seen = torch.stack(columns, 1) if entropy else columns[0]
            results.append((sequences, {"loss": sums.loss.detach(), **sums.stats}, seen.detach()))
            first += micro.n_sequences
        return loss, results


def gather_scores(
    batch: TrainBatch,
    plans: Sequence[MicroPlan],
    results: Sequence[Result],
    layout: ParallelLayout,
    *,
    whole: bool,
    columns: tuple[int, ...] = (),
) -> Tensor:
    """[T, *columns] fp32 of the sequences whose tokens this rank has, or of all (``whole``); 0 for others. Collective.

    Where every rank gets all, each is sent as a sum; else each data-parallel part to the ranks that have its tokens.
    """
    packed, n = torch.zeros(batch.n_tokens, *columns, device=HOST), batch.n_sequences
    rank, reporting = dist.get_rank(), layout.reporting()
    at = [slice(a, b) for a, b in pairwise(batch.cu_seqlens.tolist())]
    for sequences, _, values in results if rank in reporting else ():
        lengths = [at[i].stop - at[i].start for i in sequences]
        for i, own in zip(sequences, values.cpu().split(lengths), strict=True):
            packed[at[i]] = own
    mine = np.ones(n, np.bool_) if whole or batch.held is None else batch.held.numpy()
    rows = [torch.empty(-(-n // 8), dtype=torch.uint8) for _ in range(layout.world)]
    dist.all_gather(rows, torch.from_numpy(np.packbits(mine)))
    wanted = np.stack([np.unpackbits(row.numpy(), count=n).astype(np.bool_) for row in rows])
    if wanted.all():
        dist.all_reduce(packed)
        return packed
    transfers = [
        (source, target, np.flatnonzero(computed & wanted[target]))
        for source, computed in zip(reporting, computed_by(plans, batch, layout), strict=True)
        for target in range(layout.world)
    ]
    exchange(packed, dict(enumerate(at)), transfers)
    return packed


def exchange(values: Tensor, at: Mapping[int, slice], transfers: Iterable[tuple[int, int, np.ndarray]]) -> None:
    """Copy tokens ``at[i]`` of ``values`` [t, ...], on the host, for each transfer (source, target, sequences i).

    Ranks hold them at places of their own. Collective over the ranks that ``transfers`` name.
    """
    rank, ops, arriving = dist.get_rank(), list[dist.P2POp](), list[tuple[np.ndarray, Tensor]]()
    for source, target, sent in transfers:
        if rank not in (source, target) or source == target or not len(sent):
            continue
        if rank == source:
            ops.append(dist.P2POp(dist.isend, torch.cat([values[at[i]] for i in sent]), target))
        else:
            n = sum(at[i].stop - at[i].start for i in sent)
            arriving.append((sent, values.new_empty(n, *values.shape[1:])))
            ops.append(dist.P2POp(dist.irecv, arriving[-1][1], source))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    for sent, room in arriving:
        for i, own in zip(sent, room.split([at[i].stop - at[i].start for i in sent]), strict=True):
            values[at[i]] = own


class RouteRecorder:
    """The experts that routers choose in one pass, as routes of a batch for later passes (`router_replay: old`).

    A rank has the choices of its layers for its part of a micro-batch's row. The ranks of that row complete it, once a
    micro-batch. After the pass a data-parallel rank receives what another one has computed of the sequences that later
    passes ``needed`` [dp, N] on it: they cut the batch into other micro-batches. ``tp_group`` are the ranks that divide
    the row of a micro-batch, of which each has its ``context`` part.
    """

    def __init__(
        self,
        batch: TrainBatch,
        needed: np.ndarray,
        model: ShardedModel,
        tp_group: dist.ProcessGroup | None,
        context: ContextGroup | None,
    ) -> None:
        self._layout, self._rank = model.layout, dist.get_rank()
        self._needed, self._tp_group, self._context = needed, tp_group, context
        self._layers = [*chain(*(range(*ends) for ends in routed_layers(model, self._rank)))]
        h, shape = batch.token_ids.numel(), model.shape
        nothing = torch.full((1, 1, 1), -1, dtype=torch.int16, device=HOST)
        self.batch = replace(batch, routes=nothing.expand(h, shape.moe_layers, shape.experts_per_token))
        """For the pass that records: routers choose everywhere."""
        lengths = batch.cu_seqlens.diff().numpy()
        held = np.ones(len(lengths), np.bool_) if batch.held is None else batch.held.numpy()
        ends = (lengths * held).cumsum()
        self._at = {int(i): slice(int(ends[i] - lengths[i]), int(ends[i])) for i in np.flatnonzero(held)}
        dtype = torch.uint8 if shape.experts <= 256 else torch.int16
        self._found = torch.zeros(h, len(self._layers), shape.experts_per_token, dtype=dtype, device=HOST)
        self._waiting, self._plans = deque[PackedMicroBatch](), list[MicroPlan]()

    def watch(self, batches: Iterator[PackedMicroBatch], plans: Sequence[MicroPlan]) -> Iterator[PackedMicroBatch]:
        """``batches`` of ``plans``; their routes are read when the rank has computed them, and not all at the end.

        Of virtual stages the first may compute the next micro-batch while the last ones of pp - 1 before lack theirs.
        """
        self._plans += plans
        for packed in batches:
            self._waiting.append(packed)
            yield packed
            if len(self._waiting) >= self._layout.pp:
                self._collect(self._waiting.popleft())

    def routes(self) -> Tensor:
        """[H, L, K] int16: -1 in layers of other stages; undefined in sequences that are not needed. Collective."""
        while self._waiting:
            self._collect(self._waiting.popleft())
        step = self._layout.tp * self._layout.cp
        first = self._rank - self._layout.dp_rank(self._rank) * step
        computed = computed_by(self._plans, self.batch, self._layout)
        transfers = [
            (first + source * step, first + target * step, np.flatnonzero(own & wanted))
            for source, own in enumerate(computed)
            for target, wanted in enumerate(self._needed)
        ]
        exchange(self._found, self._at, transfers if self._layers else ())
        assert self.batch.routes is not None
        routes = torch.full(self.batch.routes.shape, -1, dtype=torch.int16, device=HOST)
        routes[:, self._layers] = self._found.short()
        return routes

    def _collect(self, packed: PackedMicroBatch) -> None:
        if not (packed.sequences and self._layers):
            return
        assert packed.tokens.routes is not None
        rows, tp = packed.tokens.routes.to(self._found.dtype), self._layout.tp
        if tp > 1:
            whole, parts = torch.empty_like(rows), rows.chunk(tp)  # bytes: NCCL knows no int16
            dist.all_gather_single(
                whole.view(torch.uint8), parts[self._rank % tp].view(torch.uint8), group=self._tp_group
            )
            rows = whole
        if self._context is not None:
            rows = self._context.gather(rows.view(torch.uint8)).view(rows.dtype)
        found = rows.cpu().index_select(0, packed.rows)
        at = [self._at[i] for i in packed.sequences]
        for own, values in zip(at, found.split([own.stop - own.start for own in at]), strict=True):
            self._found[own] = values


def sum_over_ranks(sums: Mapping[str, Mapping[str, float]], reporting: Collection[int]) -> dict[str, dict[str, float]]:
    """Add up each adapter's sums of the reporting ranks. All have the same names: the first of these ranks, which has
    sequences of some adapter, broadcasts them."""
    rank, source = dist.get_rank(), min(reporting)
    text = "\n".join(sorted(set().union(*sums.values()))).encode()
    size = torch.tensor([len(text)], dtype=torch.int64)
    dist.broadcast(size, source)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if rank == source else torch.zeros(int(size)).byte()
    dist.broadcast(data, source)
    names = data.numpy().tobytes().decode().split("\n")
    rows = [[own.get(name, 0.0) if rank in reporting else 0.0 for name in names] for own in sums.values()]
    values = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(values)
    return {name: dict(zip(names, row, strict=True)) for name, row in zip(sums, values.tolist(), strict=True)}

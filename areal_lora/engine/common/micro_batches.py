"""What every engine does with a batch around its model: cut it up, judge the predictions, put the results together."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.config.sections.run import Recompute
from areal_lora.data.collate import MicroPlan, find_trees, plan_microbatches, split_minibatches
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.layers.attention import PackedMicroBatch, to_sequences
from areal_lora.engine.layers.output import Readout
from areal_lora.families.flops import PassSizes
from areal_lora.types import TrainBatch

Result = tuple[tuple[int, ...], Mapping[str, float | Tensor], Tensor]
"""Sequences of one adapter in a micro-batch, the sums of its loss function (empty without one), the scores: [t], or
[t, 2] with entropies.

Nothing else of a micro-batch outlives its passes: masks and activations of all together are many times those of one.
"""


def plans_of(batch: TrainBatch, layout: ParallelLayout, token_budget: int) -> list[MicroPlan]:
    """The micro-batches of ``batch``, equal on every rank."""
    lengths = batch.cu_seqlens.diff().tolist()
    groups = list(zip(batch.group_ids.tolist(), batch.adapters, strict=True))
    return plan_microbatches(
        find_trees(lengths, batch.shared_starts.tolist(), groups),
        lengths,
        dp=layout.dp,
        token_budget=token_budget * layout.cp,
        multiple=layout.tp if layout.cp == 1 else layout.tp * 2 * layout.cp,
        uniform=layout.pp > 1,
    )


def flops_of(
    plans: Sequence[MicroPlan], batch: TrainBatch, sizes: Mapping[str, PassSizes], recompute: Recompute | None
) -> Counter[str]:
    """``flops`` and ``recomputed_flops`` of a pass, ``sizes`` by adapter; one that only scores has no ``recompute``."""
    lengths, counts = batch.cu_seqlens.diff().tolist(), Counter[str]()
    for tree in (tree for plan in plans for trees in plan.trees for tree in trees):
        of, tokens, pairs = sizes[batch.adapters[tree.sequences[0]]], tree.size(lengths), tree.pairs(lengths)
        counts["flops"] += of.forward(tokens, pairs) if recompute is None else of.training(tokens, pairs)
        if recompute not in (None, "none"):
            counts["recomputed_flops"] += of.recompute(tokens, 0 if recompute == "selective" else pairs)
    return counts


def parts_of(batch: TrainBatch, minibatches: int, layout: ParallelLayout, token_budget: int) -> np.ndarray:
    """[dp, N] bool: the sequences that each data-parallel rank computes in passes over batch and minibatches."""
    held, first = np.zeros((layout.dp, batch.n_sequences), np.bool_), 0
    for each in split_minibatches(batch, minibatches):
        for plan in plans_of(each, layout, token_budget):
            for rank, trees in enumerate(plan.trees):
                held[rank, [first + i for tree in trees for i in tree.sequences]] = True
        first += each.n_sequences
    return held if minibatches == 1 else held | parts_of(batch, 1, layout, token_budget)


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


def gather_scores(batch: TrainBatch, results: Sequence[Result], scores: Tensor, *, reports: bool) -> None:
    """Fill ``scores``, [T] or [T, 2] fp32 on the host, with those of the whole batch on every rank.

    ``reports``: this rank's results count. Collective.
    """
    scores.zero_()
    bounds = batch.cu_seqlens.tolist()
    for sequences, _, values in results if reports else ():
        at = 0
        for sequence in sequences:
            a, b = bounds[sequence], bounds[sequence + 1]
            scores[a:b] = values[at : at + b - a].cpu()
            at += b - a
    dist.all_reduce(scores)


def sum_over_ranks(sums: Mapping[str, Mapping[str, float]], reporting: Collection[int]) -> dict[str, dict[str, float]]:
    """Add up each adapter's sums of the reporting ranks. All have the same names: the first of these ranks, which has
    sequences of some adapter, broadcasts them."""
    rank = dist.get_rank()
    names = _broadcast_names(sorted(set().union(*sums.values())), min(reporting), rank)
    rows = [[own.get(name, 0.0) if rank in reporting else 0.0 for name in names] for own in sums.values()]
    values = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(values)
    return {name: dict(zip(names, row, strict=True)) for name, row in zip(sums, values.tolist(), strict=True)}


def _broadcast_names(names: list[str], source: int, rank: int) -> list[str]:
    text = "\n".join(names).encode()
    size = torch.tensor([len(text)], dtype=torch.int64)
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if rank == source:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(data, source)
    received: bytes = data.numpy().tobytes()
    return received.decode().split("\n")

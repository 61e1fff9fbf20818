"""What every engine does with a batch around its model: cut it up, judge the predictions, put the results together."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.data.collate import HOST, MicroPlan, find_trees, plan_microbatches, split_minibatches
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.layers.attention import PackedMicroBatch, to_sequences
from areal_lora.engine.layers.output import Readout
from areal_lora.types import TrainBatch

Result = tuple[tuple[int, ...], Mapping[str, float | Tensor], Tensor]
"""A micro-batch's sequences, the sums of its loss function (empty without one), the scores, [t].

Nothing else of a micro-batch outlives its passes: masks and activations of all together are many times those of one.
"""


def plans_of(batch: TrainBatch, layout: ParallelLayout, token_budget: int) -> list[MicroPlan]:
    """The micro-batches of ``batch``, equal on every rank."""
    lengths = batch.cu_seqlens.diff().tolist()
    return plan_microbatches(
        find_trees(lengths, batch.shared_starts.tolist(), batch.group_ids.tolist()),
        lengths,
        dp=layout.dp,
        token_budget=token_budget * layout.cp,
        multiple=layout.tp if layout.cp == 1 else layout.tp * 2 * layout.cp,
        uniform=layout.pp > 1,
    )


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
    loss_fn: LossFn | None

    def __call__(self, packed: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Result]:
        """Scalar to differentiate, and the result, without grad.

        ``output`` [p, 1 or 2] is that of an `OutputSite`. The sums are those of ``loss_fn`` plus ``loss``; there are
        none without one.
        """
        scores, *entropy = (to_sequences(column, packed) for column in output.unbind(1))
        if self.loss_fn is None:
            return scores.sum(), (packed.sequences, {}, scores.detach())
        if packed.micro is None:
            # Padding only: the backward pass must still run, its collectives are shared with other ranks.
            return output.sum() * 0.0, (packed.sequences, {}, scores.detach())
        sums = self.loss_fn(packed.micro, scores, entropy[0] if entropy else None)
        # Keep every rank's graph alive even if no token of this micro-batch is on the mask.
        stats = {"loss": sums.loss.detach(), **sums.stats}
        return sums.loss + output.sum() * 0.0, (packed.sequences, stats, scores.detach())


def whole_scores(batch: TrainBatch, results: Sequence[Result], *, reports: bool) -> Tensor:
    """[T] fp32 of the whole batch on every rank; ``reports``: this rank's results count. Collective."""
    packed = torch.zeros(batch.n_tokens, device=HOST)
    bounds = batch.cu_seqlens.tolist()
    for sequences, _, values in results if reports else ():
        at = 0
        for sequence in sequences:
            a, b = bounds[sequence], bounds[sequence + 1]
            packed[a:b] = values[at : at + b - a].cpu()
            at += b - a
    dist.all_reduce(packed)
    return packed


def sum_over_ranks(sums: Mapping[str, float], reporting: Collection[int]) -> dict[str, float]:
    """Add up the sums of the reporting ranks; the first of them, which has every name, broadcasts the names."""
    rank = dist.get_rank()
    names = _broadcast_names(sorted(sums), min(reporting), rank)
    values = torch.tensor([sums.get(n, 0.0) if rank in reporting else 0.0 for n in names], dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))


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

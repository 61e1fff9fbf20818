"""What every engine does with a batch around its model: cut it up, judge the predictions, put the results together.

A model's output layer is replaced once, by an `OutputSite`: it gives logits, or where the active adapter has a value
head one value per token and no logits. `Readout` is the other side: what a caller reads from the output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from areal_lora.data.collate import HOST, MicroPlan, find_trees, plan_microbatches
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.layers.attention import PackedMicroBatch, to_sequences
from areal_lora.engine.layers.expert_mlp import ActiveAdapter
from areal_lora.engine.layers.vocab_logprobs import vocab_logprobs
from areal_lora.types import TrainBatch

Readout = Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup | None], tuple[Tensor, Tensor]]
"""``readout(output [t, *], rows [p], targets [p], group) -> (predictions [p], entropy [p])``, fp32, differentiable.

Prediction k is that of row ``rows[k]``."""


def read_logprobs(temperature: float) -> Readout:
    """Log-probabilities of the targets from this rank's part of the logits, and entropies."""
    return partial(vocab_logprobs, temperature=temperature)


def read_values(
    output: Tensor, rows: Tensor, targets: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Values of the states before the targets, which are equal on all tensor-parallel ranks; no entropies (zeros)."""
    values = output[:, 0].index_select(0, rows)
    return values, values.new_zeros(values.shape)


class ValueHead:
    """``V = w h + b`` of a hidden state h, computed in fp32: ``weight`` [hidden], ``bias`` [1]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., hidden] to [..., 1]."""
        return functional.linear(hidden.float(), self.weight[None]) + self.bias


class OutputSite:
    """In place of the ``forward`` of an output layer: its logits, or the values of the active adapter's head.

    ``wrap`` turns values [..., 1] into what the layer would return.
    """

    def __init__(self, layer: nn.Module, active: ActiveAdapter, wrap: Callable[[Tensor], Any]) -> None:
        self.heads: dict[str, ValueHead] = {}
        self._logits, self._active, self._wrap = layer.forward, active, wrap
        layer.forward = self

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        head = self.heads.get(self._active.name or "")
        return self._logits(hidden, *args, **kwargs) if head is None else self._wrap(head(hidden))


Result = tuple[tuple[int, ...], Mapping[str, float | Tensor], Tensor]
"""A micro-batch's sequences, the sums of its loss function (empty without one), what the readout read, [t].

Nothing else of a micro-batch outlives its passes: masks and activations of all together are many times those of one.
"""


def plans_of(batch: TrainBatch, layout: ParallelLayout, token_budget: int) -> list[MicroPlan]:
    """The micro-batches of ``batch``, equal on every rank."""
    bounds = batch.cu_seqlens.tolist()
    return plan_microbatches(
        find_trees(batch.token_ids.numpy(), bounds, batch.group_ids.tolist()),
        [b - a for a, b in pairwise(bounds)],
        dp=layout.dp,
        token_budget=token_budget,
        multiple=layout.tp,
        uniform=layout.pp > 1,
    )


Judge = Callable[[PackedMicroBatch, Tensor, Tensor, dist.ProcessGroup | None], tuple[Tensor, Result]]
"""`judge` of one batch, called on the last pipeline stage for each of its micro-batches."""


def judge(
    packed: PackedMicroBatch,
    output: Tensor,
    rows: Tensor,
    group: dist.ProcessGroup | None,
    *,
    loss_fn: LossFn | None,
    readout: Readout,
    need_entropy: bool,
) -> tuple[Tensor, Result]:
    """Scalar to differentiate, and the result, without grad.

    ``output`` [t, *] is the model's, ``rows`` [p] are those of ``packed``'s predictions, ``group`` is the
    tensor-parallel one. The sums are those of ``loss_fn`` plus ``loss``; there are none without one.
    """
    predicted, entropy = readout(output, rows, packed.targets, group)
    scores = to_sequences(predicted, packed)
    if loss_fn is None:
        return scores.sum(), (packed.sequences, {}, scores.detach())
    if packed.micro is None:
        # Padding only: the backward pass must still run, its collectives are shared with other ranks.
        return output.sum() * 0.0, (packed.sequences, {}, scores.detach())
    sums = loss_fn(packed.micro, scores, to_sequences(entropy, packed) if need_entropy else None)
    # Keep every rank's graph alive even if no token of this micro-batch is on the mask.
    stats = {"loss": sums.loss.detach(), **sums.stats}
    return sums.loss + predicted.sum() * 0.0, (packed.sequences, stats, scores.detach())


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

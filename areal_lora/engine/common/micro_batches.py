"""What every engine does with a batch around its model: cut it up, judge the predictions, put the results together.

A model's output layer is replaced once, by an `OutputSite`: it gives logits, or where the active adapter has a value
head one value per token and no logits. `Readout` is the other side: what a caller reads from the output.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        token_budget=token_budget * layout.cp,
        multiple=layout.tp if layout.cp == 1 else layout.tp * 2 * layout.cp,
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


CHUNK = 2**24
"""Logits of one part of the rows; each of its fp32 buffers takes 64 MiB.

The rows are computed in parts, and again in the backward pass: only parts exist in fp32. The logits and their gradient
have the model's type.
"""


class _VocabParallel(torch.autograd.Function):  # type: ignore[misc]
    """``(log p(target), entropy)`` from logit shards [t, V / tp] of which prediction k uses row ``rows[k]``.

    With z the logits over the temperature and p = softmax(z): d log p(y) / dz = onehot(y) - p, and
    d H / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, target: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        world = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        top = (logits.amax(-1).float() / temperature).index_select(0, rows)
        if world > 1:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        local = target - rank * logits.shape[-1]
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        sums = top.new_empty(3, rows.numel())  # of exp(z), z of the target, of z exp(z), all after the maximum
        for part, shifted in _parts(logits, rows, top, temperature):
            sums[1, part] = shifted.gather(-1, local[part, None])[:, 0] * here[part]
            exps = shifted.exp()
            sums[0, part] = exps.sum(-1)
            sums[2, part] = exps.mul_(shifted).sum(-1)
        if world > 1:
            dist.all_reduce(sums, group=group)
        total, chosen, weighted = sums.unbind(0)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, rows, top, log_total, entropy, local, here)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits, rows, top, log_total, entropy, local, here = ctx.saved_tensors
        d_logprob, d_entropy = grads
        gradient = torch.zeros_like(logits)
        for part, shifted in _parts(logits, rows, top, ctx.temperature):
            logp = shifted.sub_(log_total[part, None])
            change = torch.zeros_like(logp) if d_logprob is None else logp.exp().mul_(-d_logprob[part, None])
            if d_logprob is not None:
                change.scatter_add_(-1, local[part, None], (d_logprob[part] * here[part])[:, None])
            if d_entropy is not None:
                change -= d_entropy[part, None] * logp.exp().mul_(logp + entropy[part, None])
            gradient.index_add_(0, rows[part], change.div_(ctx.temperature).to(logits.dtype))
        return gradient, None, None, None, None


def _parts(logits: Tensor, rows: Tensor, top: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Runs of predictions, and their logits over the temperature minus ``top``, fp32 [run, V / tp]."""
    size = max(1, CHUNK // logits.shape[-1])
    for first in range(0, rows.numel(), size):
        part = slice(first, first + size)
        scaled = logits.index_select(0, rows[part]).float().div_(temperature)
        yield part, scaled.sub_(top[part, None])


def vocab_logprobs(
    logits: Tensor, rows: Tensor, target: Tensor, group: dist.ProcessGroup | None, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``target`` [p] and entropy, [p] fp32 each, differentiable.

    ``logits`` [t, V / tp] is this rank's part of the vocabulary, in rank order. Prediction k is that of row
    ``rows[k]`` [p] int64; a row may have several.
    """
    logprobs, entropy = _VocabParallel.apply(logits, rows, target, temperature, group)
    return logprobs, entropy

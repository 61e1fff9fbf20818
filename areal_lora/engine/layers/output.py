"""The output layer of both engines: log-probabilities, entropies or values, and never the logits of a micro-batch.

32 k tokens have 10 GB of logits over a vocabulary of 152 k in bfloat16, and as much of gradients. So an output layer
is replaced once, by an `OutputSite`, which gets hidden states and computes logits for a chunk of predictions at a time:
once in the forward pass and again in the backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.engine.layers.active import ActiveAdapters
from areal_lora.engine.layers.attention import PackedMicroBatch

CHUNK = 2**26
"""Logits of a chunk, 256 MiB in fp32. 441 predictions over a vocabulary of 152 k: fewer would wait for the layer's
weight, which every chunk reads (0.2 ms of an H100 for 0.6 GB, as long as the products of 220)."""


class ValueHead:
    """``V = w h + b`` of a hidden state h, computed in fp32: ``weight`` [hidden], ``bias`` [1]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., hidden] to [..., 1]."""
        return nn.functional.linear(hidden.float(), self.weight[None]) + self.bias


@dataclass(frozen=True, slots=True)
class Readout:
    """What a pass reads: log-probabilities at a ``temperature``, and entropies where they are wanted."""

    temperature: float = 1.0
    entropy: bool = False


class OutputSite:
    """In place of the ``forward`` of an output layer: predictions [p, 1 or 2] fp32, differentiable.

    The first column has log-probabilities of the targets, the second entropies where wanted. Where the adapter in use
    has a value head there is one column, the values of the states before the targets.

    ``group`` divides the vocabulary, in rank order. ``whole(rows, parts)`` gathers what its ranks hold of a sequence;
    ``parts``: each rank has a part of the gradient, else all have it whole. ``scale`` multiplies the logits. ``wrap``
    turns predictions into what the layer would return.
    """

    def __init__(
        self,
        layer: nn.Module,
        active: ActiveAdapters,
        wrap: Callable[[Tensor], Any],
        *,
        group: dist.ProcessGroup | None = None,
        whole: Callable[[Tensor, bool], Tensor] = lambda rows, _: rows,
        scale: float = 1.0,
    ) -> None:
        self.heads: dict[str, ValueHead] = {}
        self._layer, self._active, self._wrap, self._group, self._whole = layer, active, wrap, group, whole
        self._scale = scale
        self._next: tuple[PackedMicroBatch, Readout] | None = None
        layer.forward = self

    def expect(self, packed: PackedMicroBatch, readout: Readout) -> None:
        """Read the predictions of ``packed`` in the next call."""
        self._next = packed, readout

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> Any:
        """``hidden`` [t, 1, h] or [1, t, h], of this rank's part of the sequence."""
        assert self._next is not None, "an output layer is called once for each micro-batch"
        (packed, readout), self._next = self._next, None
        head = self.heads.get(next(iter(self._active.each), ""))
        if head is not None:  # its adapter is the only one in use
            return self._wrap(self._whole(head(hidden), False).view(-1, 1).index_select(0, packed.sources))
        rows = self._whole(hidden, True).view(-1, hidden.shape[-1])
        layer: Any = self._layer
        return self._wrap(
            predictions(
                rows,
                layer.weight if weight is None else weight,
                layer.bias,
                packed.sources,
                packed.targets,
                Readout(readout.temperature / self._scale, readout.entropy),
                self._group,
                packed.kept,
            )
        )


def predictions(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sources: Tensor,
    targets: Tensor,
    readout: Readout,
    group: dist.ProcessGroup | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Log-probability of ``targets`` [p] int64, [p, 1] fp32, with entropies [p, 2]; ``hidden`` gets a gradient.

    Prediction k is that of row ``sources[k]`` of ``hidden`` [t, h], whose logits are products with ``weight`` [V, h]
    plus ``bias`` [V], rounded to their type. A row may have several. With a ``group`` both are this rank's part of the
    vocabulary, and so is the gradient. ``kept`` [p, n] are the ids of the whole vocabulary over which each prediction
    is normalised, filled up with -1; one with -1 alone is over all. A target is among its ids.
    """
    found: Tensor = _Predictions.apply(hidden, weight, bias, sources, targets, readout, group, kept)
    return found


class _Predictions(torch.autograd.Function):  # type: ignore[misc]
    """With z the logits over the temperature, p = softmax(z) and H its entropy: d log p(y) / dz = onehot(y) - p, and
    d H / dz = -p (log p + H). Ranks sum exponentials after their own maximum, which are then brought to that of all.
    Logits that are not kept are `LEFT_OUT`, and so p = 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sources: Tensor,
        targets: Tensor,
        readout: Readout,
        group: dist.ProcessGroup | None,
        kept: Tensor | None,
    ) -> Tensor:
        vocabulary = weight.shape[0]
        world = 1 if group is None else dist.get_world_size(group)
        first = 0 if group is None else dist.get_rank(group) * vocabulary
        local = targets - first
        here = (local >= 0) & (local < vocabulary)
        local = local.clamp(0, vocabulary - 1)
        top = hidden.new_empty(len(sources), dtype=torch.float32)
        sums = top.new_zeros(3, len(sources))  # of exp(z), z of the target, of z exp(z), all after the maximum
        for part, z in _chunks(hidden, weight, bias, sources, readout.temperature, kept, first):
            top[part] = z.amax(-1)
            z -= top[part, None]
            sums[1, part] = z.gather(-1, local[part, None])[:, 0]
            exps = z.exp()
            sums[0, part] = exps.sum(-1)
            if readout.entropy:
                sums[2, part] = exps.mul_(z).sum(-1)
            del z, exps  # before the next chunk is made
        if world > 1:
            own = top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            below = own - top
            sums[2] += below * sums[0]
            sums[1] = (sums[1] + below) * here
            sums[::2] *= below.exp()
            dist.all_reduce(sums, group=group)
        total, chosen, weighted = sums.unbind(0)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, bias, sources, top, log_total, entropy, local, here, kept)
        ctx.readout, ctx.first = readout, first
        return torch.stack([chosen - log_total, *([entropy] if readout.entropy else [])], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, sources, top, log_total, entropy, local, here, kept = ctx.saved_tensors
        by = grads[0] / ctx.readout.temperature
        by_logprob = by[:, :1]
        gradient, log_sums = torch.zeros_like(hidden), top + log_total
        for part, z in _chunks(hidden, weight, bias, sources, ctx.readout.temperature, kept, ctx.first):
            logp = z.sub_(log_sums[part, None])
            change = logp.exp()
            factor = -by_logprob[part]
            if ctx.readout.entropy:  # by few passes over all logits
                slope = -by[part, 1:]
                factor = torch.addcmul(torch.addcmul(factor, slope, entropy[part, None]), slope, logp, out=logp)
            change *= factor
            change.scatter_add_(-1, local[part, None], by_logprob[part] * here[part, None])
            rows = change.to(weight.dtype) @ weight
            gradient.index_add_(0, sources[part], rows)
            del z, logp, change, factor
        return gradient, *(None,) * 7


LEFT_OUT = -1e30
"""A logit whose exponential is 0 below any other; its sums and products are finite."""


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sources: Tensor,
    temperature: float,
    kept: Tensor | None,
    first: int,
) -> Iterator[tuple[slice, Tensor]]:
    """Runs of predictions, and their logits over the temperature, fp32 [run, V], which the caller may overwrite.

    The logits are those of the ids from ``first`` on.
    """
    vocabulary = weight.shape[0]
    size = max(1, CHUNK // vocabulary)
    for start in range(0, len(sources), size):
        part = slice(start, start + size)
        z = nn.functional.linear(hidden.index_select(0, sources[part]), weight, bias).float()
        if temperature != 1.0:
            z /= temperature
        if kept is not None:
            ids = kept[part].long() - first
            out = (kept[part, :1] >= 0).expand(-1, vocabulary + 1).contiguous()
            out.scatter_(1, torch.where((kept[part] >= 0) & (ids >= 0) & (ids < vocabulary), ids, vocabulary), False)
            z.masked_fill_(out[:, :vocabulary], LEFT_OUT)
            del out
        yield part, z

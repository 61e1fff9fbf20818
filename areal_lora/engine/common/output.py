"""What a model gives for each token in the end: logits, or with a critic's adapter one value.

A model's output layer is replaced once, by an `OutputSite`. Where the active adapter has a value head, the last hidden
state goes through that and no logits are computed. `Readout` is the other side: what a caller reads from the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from areal_lora.engine.layers.residents import ActiveAdapter
from areal_lora.engine.layers.vocab_logprobs import vocab_logprobs

Readout = Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup | None], tuple[Tensor, Tensor]]
"""``readout(output [t, *], rows [p], targets [p], group) -> (predictions [p], entropy [p])``, fp32, differentiable.

Prediction k is that of row ``rows[k]``."""


def read_logprobs(temperature: float) -> Readout:
    """Log-probabilities of the targets from this rank's part of the logits, and entropies."""
    return partial(_logprobs, temperature)


def _logprobs(
    temperature: float, output: Tensor, rows: Tensor, targets: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    return vocab_logprobs(output, rows, targets, temperature=temperature, group=group)


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

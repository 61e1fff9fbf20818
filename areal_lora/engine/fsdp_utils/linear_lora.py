"""The adapters of linear layers: hooks of frozen modules, with the part of each resident adapter by name.

Projections of one input, such as q, k and v, share a lora_A, and its product. Their lora_B lies as one matrix in the
adapter's memory, in the order of Megatron's fused layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import Bank
from areal_lora.engine.layers.active import ActiveAdapter, ActiveAdapters, kept
from areal_lora.families.sites import RowRanges


class SharedInput:
    """``A x`` of the ``projections`` that read the same input: computed by the first of them for all adapters in use.

    ``lora_a`` has the [r, in] of each resident adapter, and its number for dropout. The products are forgotten with the
    last projection, so that they outlive no layer's pass.
    """

    def __init__(self, projections: int) -> None:
        self.lora_a: dict[str, tuple[nn.Parameter, int]] = {}
        self._projections = projections
        self._known: tuple[Tensor, dict[str, Tensor]] | None = None
        self._left = 0

    def hidden(self, x: Tensor, active: ActiveAdapters) -> dict[str, Tensor]:
        """By adapter [rows, r] of its rows of the layer's input ``x`` [..., in]."""
        if self._known is None or self._known[0] is not x:
            found = {}
            for adapter, rows in zip(active.each, active.split(x.reshape(-1, x.shape[-1])), strict=True):
                if adapter.name in self.lora_a:
                    lora_a, site = self.lora_a[adapter.name]
                    found[adapter.name] = functional.linear(kept(rows, adapter.keep(site, rows.shape[-1])), lora_a)
            self._known, self._left = (x, found), self._projections
        hidden, self._left = self._known[1], self._left - 1
        if not self._left:
            self._known = None
        return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLora:
    """``scale * B h`` of one projection: ``lora_b`` and its gradient [runs, rows of a run, r]."""

    lora_b: Tensor
    grad: Tensor | None
    scale: float

    @classmethod
    def of(cls, memory: AdapterMemory, bank: Bank, rows: RowRanges, scale: float) -> "LinearLora":
        """With ``rows`` of a bank's lora_B, in runs that are equally long and equally far apart.

        A frozen adapter has no gradient.
        """
        (start, stop), *others = rows
        r = bank.b_shape[2]
        pitch = others[0][0] - start if others else stop - start
        view = (len(rows), stop - start, r), (pitch * r, r, 1), bank.b + start * r
        grad = None if memory.frozen else memory.grads.as_strided(*view)
        return cls(lora_b=memory.cast.as_strided(*view), grad=grad, scale=scale)

    def add_to(self, output: Tensor, hidden: Tensor, adapter: ActiveAdapter) -> Tensor:
        """``output`` [..., out], which it changes, plus what the adapter's rows have of their ``hidden`` [rows, r]."""
        added: Tensor = _AddProduct.apply(
            output, hidden, self.lora_b, self.grad, self.scale * adapter.factor, adapter.start
        )
        return added


class _AddProduct(torch.autograd.Function):  # type: ignore[misc]
    """Add ``scale * hidden B'`` to ``output`` in its place: the backward pass of a frozen layer does not read it.

    The rows of B lie apart in memory; torch would add their gradients run by run.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, hidden: Tensor, lora_b: Tensor, grad: Tensor | None, scale: float, start: int
    ) -> Tensor:
        weight = lora_b.flatten(0, 1)
        ctx.save_for_backward(hidden, weight)
        ctx.mark_dirty(output)
        ctx.grad, ctx.scale, ctx.start = grad, scale, start
        output.view(-1, output.shape[-1]).narrow(0, start, len(hidden)).addmm_(hidden, weight.t(), alpha=scale)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (hidden, weight) = grads, ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1]).narrow(0, ctx.start, len(hidden))
        ctx.grad.add_((rows.t() @ hidden).view(ctx.grad.shape), alpha=ctx.scale)
        return dy, torch.addmm(hidden, rows, weight, beta=0, alpha=ctx.scale), None, None, None, None


class LinearSite:
    """The forward hook of a linear layer, one of those that read the input ``shared``."""

    def __init__(self, module: nn.Module, shared: SharedInput, active: ActiveAdapters) -> None:
        self.shared, self._active = shared, active
        self.adapters: dict[str, LinearLora] = {}
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Sequence[Tensor], output: Tensor) -> Tensor:
        used = [adapter for adapter in self._active.each if adapter.name in self.adapters]
        hidden = self.shared.hidden(args[0], self._active) if used else {}
        for adapter in used:
            output = self.adapters[adapter.name].add_to(output, hidden[adapter.name], adapter)
        return output

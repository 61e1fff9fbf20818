"""The adapters of linear layers: hooks of frozen modules, with the part of each resident adapter by name.

Projections of one input, such as q, k and v, share a lora_A, and its product. Their lora_B lies as one matrix in the
adapter's memory, in the order of Megatron's fused layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import Bank
from areal_lora.engine.layers.active import ActiveAdapters
from areal_lora.engine.layers.grouped_lora import Groups, UpProjection, down_projection
from areal_lora.families.sites import RowRanges


class SharedInput:
    """``A x`` of the ``projections`` that read the same input: computed by the first of them for all adapters in use.

    ``lora_a`` has the [r, in] of each resident adapter; ``site`` is the layer's number for dropout. The product is
    forgotten with the last projection, so that it outlives no layer's pass.
    """

    def __init__(self, projections: int, site: int) -> None:
        self.lora_a: dict[str, nn.Parameter] = {}
        self._projections, self._site = projections, site
        self._known: tuple[Tensor, Tensor] | None = None
        self._left = 0

    def hidden(self, x: Tensor, active: ActiveAdapters) -> Tensor:
        """[t, r] of the layer's input ``x`` [..., in]; r is one adapter's rank, or as in `stacked`."""
        if self._known is None or self._known[0] is not x:
            flat, lora_a = x.reshape(-1, x.shape[-1]), [self.lora_a.get(name) for name in active.each]
            keep = active.keep(active.tokens, self._site, flat.shape[1])
            found = down_projection(flat, active.tokens, keep, lora_a)
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


class _AddProduct(torch.autograd.Function):  # type: ignore[misc]
    """Add one adapter's ``scale * hidden B'`` to ``output`` in its place: no backward pass of a frozen layer reads it.

    The rows of B lie apart in memory; torch would add their gradients run by run. `UpProjection` would be a product and
    a sum, and round apart.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, lora_b: Tensor, grad: Tensor | None, scale: float) -> Tensor:
        weight = lora_b.flatten(0, 1)
        ctx.save_for_backward(hidden, weight)
        ctx.mark_dirty(output)
        ctx.grad, ctx.scale = grad, scale
        output.view(-1, output.shape[-1]).addmm_(hidden, weight.t(), alpha=scale)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (hidden, weight) = grads, ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        ctx.grad.add_((rows.t() @ hidden).view(ctx.grad.shape), alpha=ctx.scale)
        return dy, torch.addmm(hidden, rows, weight, beta=0, alpha=ctx.scale), None, None, None


class LinearSite:
    """The forward hook of a linear layer, one of those that read the input ``shared``."""

    def __init__(self, module: nn.Module, shared: SharedInput, active: ActiveAdapters) -> None:
        self.shared, self._active = shared, active
        self.adapters: dict[str, LinearLora] = {}
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Sequence[Tensor], output: Tensor) -> Tensor:
        active = self._active
        parts = [self.adapters.get(name) for name in active.each]
        if not any(parts):
            return output
        hidden, rows = self.shared.hidden(args[0], active), active.tokens
        scale = active.scale([part.scale if part else 1.0 for part in parts], rows)
        lora_b = [part.lora_b if part else None for part in parts]
        grads = [part.grad if part else None for part in parts]
        if len(parts) == 1:
            added: Tensor = _AddProduct.apply(output, hidden, *lora_b, *grads, scale)
            return added
        return output.add_(UpProjection.apply(hidden, Groups.of(rows), scale, lora_b, grads).view_as(output))

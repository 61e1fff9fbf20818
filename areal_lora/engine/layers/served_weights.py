"""Compute with the weights that servers hold: rounded by a quantisation, or with an adapter merged into them.

A weight is replaced when the module that computes with it starts its forward pass, and restored behind it, so a rank
holds one module's weights twice: a linear layer's, or those of a layer's experts on the rank. FSDP has gathered them by
then. Only for passes without gradients.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.algorithms.merging import fp8, magnitudes
from areal_lora.config.sections.run import ServedAs

CHUNK = 64 * 2**20
"""Elements that are rounded at once, in fp32: some launches for a stack of experts, and bounded memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedPart:
    """``scale * b @ a`` of an adapter, fp32: [r, in] and [out, r], or [n, ...] of stacked experts, which may share one.

    The rows of ``b`` may be in runs [runs, rows, r].
    """

    a: Tensor
    b: Tensor
    scale: float

    def rows(self, at: slice, stacked: bool) -> Tensor:
        """Of the output rows ``at``, of the experts ``at`` where the weight is ``stacked``."""
        if not stacked:
            return self.scale * (self.b.flatten(0, -2)[at] @ self.a)
        a, b = (part[at] if part.dim() == 3 else part for part in (self.a, self.b))
        return self.scale * (b @ a)

    @classmethod
    def of(cls, weights: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> "MergedPart | None":
        """Of an adapter's flat ``weights``: ``a`` and ``b`` are views of them, or at the same place of their cast."""
        if a is None or b is None:
            return None
        a, b = (weights.as_strided(part.shape, part.stride(), part.storage_offset()) for part in (a, b))
        return cls(a=a, b=b, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSite:
    """The parameter ``name`` of ``owner``, [out, in] or [n, out, in], with which ``module`` computes.

    Ranks of ``group`` have its other columns (``row_parallel``) or rows. A server holds it in one matrix with the
    weights of ``fused``.
    """

    module: nn.Module
    owner: nn.Module
    name: str = "weight"
    group: dist.ProcessGroup | None = None
    row_parallel: bool = False
    fused: tuple[nn.Module, ...] = ()
    part: MergedPart | None = None

    def served(self, kind: ServedAs) -> Tensor:
        """A copy as servers hold it, in its own type. Collective over ``group``."""
        weight = self.owner.get_parameter(self.name).data
        found, step = torch.empty_like(weight), max(1, CHUNK // weight[0].numel())
        parts = [slice(start, start + step) for start in range(0, len(weight), step)]
        if kind == "merged":
            assert self.part is not None
            for at in parts:
                found[at] = self.part.rows(at, weight.dim() == 3).add_(weight[at])
            return found
        largest = magnitudes(weight, kind)
        if kind == "fp8_per_tensor":
            for other in self.fused:
                largest = torch.maximum(largest, magnitudes(other.get_parameter(self.name).data, kind))
        if self.group is not None and (self.row_parallel or kind == "fp8_per_tensor"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        for at in parts:
            found[at] = fp8(weight[at], largest[at] if len(largest) == len(weight) else largest, kind)
        return found


@dataclass(slots=True)
class _Swap:
    """The hooks of a site; ``own`` are the parameter and its numbers while others are in their place."""

    site: ServedSite
    kind: ServedAs
    own: tuple[nn.Parameter, Tensor] | None = None

    def replace(self, *_: Any) -> None:
        parameter = self.site.owner.get_parameter(self.site.name)
        self.own = parameter, parameter.data
        parameter.data = self.site.served(self.kind)

    def restore(self, *_: Any) -> None:
        if self.own is not None:
            parameter, numbers = self.own
            parameter.data, self.own = numbers, None


@contextmanager
def served_weights(sites: Iterable[ServedSite], kind: ServedAs) -> Iterator[None]:
    """Let forward passes compute with the weights of ``sites`` as servers hold them until the context ends."""
    swaps = [_Swap(site, kind) for site in sites if kind != "merged" or site.part is not None]
    hooks = [
        hook
        for swap in swaps
        for hook in (
            swap.site.module.register_forward_pre_hook(swap.replace),
            swap.site.module.register_forward_hook(swap.restore),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for swap in swaps:
            swap.restore()

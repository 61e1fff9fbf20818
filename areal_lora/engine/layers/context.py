"""Context parallelism: the ranks of a group compute one row of packed tokens together.

The row is cut into `ZIGZAGS` times 2 * size equal parts. Of each 2 * size rank r computes parts r and 2 * size - 1 - r:
under a causal mask the later of the two costs what the earlier one saves (Llama 3, arXiv 2407.21783, section 3.3.2), if
one sequence fills them. Several zigzags balance rows of shorter sequences. Attention gathers keys and values of the
whole row; everything else is computed token by token. To Megatron and FSDP the ranks of a group are data-parallel ones,
whose gradients are summed anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ZIGZAGS = 4
"""More balance ranks better, and copy more keys: each part takes those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """Place ``rank`` of ``size`` in a context-parallel ``group``."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, groups: Sequence[Sequence[int]], rank: int) -> "ContextGroup | None":
        """Make ``groups`` of ranks, all of one size; that of ``rank``, None where it is alone. Collective."""
        if len(groups[0]) == 1:
            return None
        made = [dist.new_group(list(ranks)) for ranks in groups]
        (found,) = (n for n, ranks in enumerate(groups) if rank in ranks)
        return cls(rank=groups[found].index(rank), size=len(groups[found]), group=made[found])

    def parts(self, n: int) -> list[tuple[int, int]]:
        """First and end of this rank's parts, in order, of a row of ``n`` tokens, a multiple of 2 * size.

        Rows that cannot be divided further have fewer zigzags.
        """
        each = 2 * self.size
        zigzags = int(np.gcd(n // each, ZIGZAGS))
        part = n // (each * zigzags)
        own = [i for i in range(each * zigzags) if self.rank in (i % each, each - 1 - i % each)]
        return [(i * part, (i + 1) * part) for i in own]

    def places(self, n: int) -> np.ndarray[Any, Any]:
        """[n] int64: where each token of a row of ``n`` is once the ranks' parts are gathered, one after the other.

        A rank has n / size tokens.
        """
        ranks = (ContextGroup(rank=rank, size=self.size) for rank in range(self.size))
        order = np.concatenate([np.arange(*bounds) for each in ranks for bounds in each.parts(n)])
        places = np.empty(n, dtype=np.int64)
        places[order] = np.arange(n)
        return places

    def gather(self, x: Tensor, *, equal: bool = False) -> Tensor:
        """``x`` [t, ...] of every rank: [size * t, ...]. Each rank's gradient of it is a part of the whole one.

        ``equal``: all ranks compute alike from the result, so each has the whole gradient.
        """
        gathered: Tensor = _Gather.apply(x, self, equal)
        return gathered


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: ContextGroup, equal: bool) -> Tensor:
        ctx.at, ctx.equal = at, equal
        gathered = x.new_empty(at.size * len(x), *x.shape[1:])
        dist.all_gather_single(gathered, x.contiguous(), group=at.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        at, (grad,) = ctx.at, grads
        if ctx.equal:
            return grad.chunk(at.size)[at.rank], None, None
        own = grad.new_empty(len(grad) // at.size, *grad.shape[1:])
        dist.reduce_scatter_single(own, grad.contiguous(), group=at.group)
        return own, None, None

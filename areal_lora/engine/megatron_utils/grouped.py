"""A rank's experts as one module: grouped linear layers in plain torch.

Megatron's `TEGroupedMLP` takes the two linear layers as submodules and ships them only with
Transformer Engine. These need nothing but torch, so grouped experts run on every device and
the same adapter code serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from megatron.core.utils import divide
from torch import Tensor, nn
from torch.nn import functional

ALIGN_BYTES = 16  # torch's grouped matrix product wants rows that start at multiples of this


def grouped_linear(x: Tensor, weight: Tensor, splits: Sequence[int]) -> Tensor:
    """[T, out]: rows of expert e, ``splits[e]`` of them, times ``weight[e]`` [out, in] transposed."""
    item = x.element_size()
    if x.shape[0] and not (x.shape[1] * item % ALIGN_BYTES or weight.shape[1] * item % ALIGN_BYTES):
        ends = torch.tensor(list(accumulate(splits)), dtype=torch.int32, device=x.device)
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts = x.split(list(splits))
    return torch.cat([functional.linear(part, w) for part, w in zip(parts, weight.unbind(), strict=True)])


class _GroupedLinear(nn.Module):  # type: ignore[misc]
    """Experts' weights stacked, [n, out, in] of this rank. ``forward(x, m_splits)`` returns (output, no bias)."""

    def __init__(self, n: int, n_in: int, n_out: int, config: Any, init_method: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(n, n_out, n_in, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        return grouped_linear(x, self.weight, m_splits), None


class ColumnGroupedLinear(_GroupedLinear):
    """Output features divided over the expert-tensor-parallel ranks."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        pg_collection: Any,
        **_: object,
    ) -> None:
        super().__init__(num_gemms, input_size, divide(output_size, pg_collection.expt_tp.size()), config, init_method)


class RowGroupedLinear(_GroupedLinear):
    """Input features divided over the expert-tensor-parallel ranks; the dispatcher sums the outputs."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        pg_collection: Any,
        **_: object,
    ) -> None:
        super().__init__(num_gemms, divide(input_size, pg_collection.expt_tp.size()), output_size, config, init_method)

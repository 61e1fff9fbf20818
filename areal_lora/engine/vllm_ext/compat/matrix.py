"""A matrix of the served model's adapters, as one worker holds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areal_lora.weight_sync.served import LORA_A, LORA_B


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One ``lora_A`` or ``lora_B`` of the model as one worker holds it.

    ``stacked`` is ``[S, E, max_rank, in_part]`` (A) or ``[S, E, out_part, max_rank]`` (B) for S slots,
    of which this is entry ``index`` of the second dimension; None where another worker holds it
    (expert parallel). The part is ``start`` onwards of an in- or output dimension that is ``full``
    long (tensor parallel).
    """

    name: str
    stacked: torch.Tensor | None
    index: int
    start: int
    full: int

    @property
    def is_a(self) -> bool:
        return self.name.endswith(LORA_A)

    @property
    def module(self) -> str:
        return self.name.removesuffix(LORA_A).removesuffix(LORA_B)

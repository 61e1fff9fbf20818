"""Compute LoRA of linear layers in plain torch, for CPUs: one product per adapter, not one per token.

vLLM's own CPU path gathers the weights of every token and lets tokens without an adapter
(index -1) read the last slot. This module skips such tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTokens:
    """The tokens of a batch that use one adapter slot: a run of rows, or scattered row numbers."""

    slot: int
    rows: slice | torch.Tensor  # [n] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlots:
    """Adapter slots of the T tokens of a batch.

    Token t uses slot ``groups[group_of[t]]``, none where that is negative; ``by_slot`` holds
    the others.
    """

    groups: np.ndarray  # [G] int64, sorted
    group_of: np.ndarray  # [T] int64
    by_slot: tuple[SlotTokens, ...]

    @classmethod
    def of(cls, slots: np.ndarray) -> BatchSlots:
        """``slots`` [T] int, negative for tokens without an adapter."""
        groups, group_of = np.unique(slots, return_inverse=True)
        by_slot = []
        for slot in groups[groups >= 0].tolist():
            rows = np.flatnonzero(slots == slot)
            first, last = int(rows[0]), int(rows[-1])
            run = last - first + 1 == len(rows)
            by_slot.append(SlotTokens(slot=slot, rows=slice(first, last + 1) if run else torch.from_numpy(rows)))
        return cls(groups=groups, group_of=group_of, by_slot=tuple(by_slot))


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    widths: Sequence[int],
    by_slot: Sequence[SlotTokens],
) -> None:
    """``y[:, part] += x A^T B^T`` in place, for every part of a merged projection.

    ``y`` [T, sum(widths)], ``x`` [T, in]; ``lora_a`` [S, 1, r, in] and ``lora_b`` [S, 1, width, r] per part.
    """
    for tokens in by_slot:
        rows, slot = tokens.rows, tokens.slot
        xs = x[rows]
        at = 0
        for a, b, width in zip(lora_a, lora_b, widths, strict=True):
            low = xs @ a[slot, 0].t()
            part = y[:, at : at + width]
            if isinstance(rows, slice):
                part[rows].addmm_(low, b[slot, 0].t())
            else:
                part.index_add_(0, rows, low @ b[slot, 0].t())
            at += width

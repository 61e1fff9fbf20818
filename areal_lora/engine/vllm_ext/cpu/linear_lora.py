"""Compute LoRA of linear layers for CPUs: in float32 in compiled loops, else one product per adapter.

vLLM's own CPU path gathers the weights of every token and lets tokens without an adapter
(index -1) read the last slot. This module skips such tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_lora.engine.vllm_ext.cpu.loops import add_lora_rows, looped


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTokens:
    """The tokens of a batch that use one adapter slot: a run of rows, or scattered row numbers."""

    slot: int
    rows: slice | torch.Tensor  # [n] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlots:
    """Adapter slots of the T tokens of a batch.

    Token t uses slot ``groups[group_of[t]]``, none where that is negative; ``by_slot`` holds
    the others, and so do ``rows`` and ``cells`` (see ``loops``).
    """

    groups: np.ndarray  # [G] int64, sorted
    group_of: np.ndarray  # [T] int64
    by_slot: tuple[SlotTokens, ...]
    rows: np.ndarray  # [tokens with an adapter] int64
    cells: np.ndarray  # [slots, 4] int64

    @classmethod
    def of(cls, slots: np.ndarray) -> BatchSlots:
        """``slots`` [T] int, negative for tokens without an adapter."""
        groups, group_of = np.unique(slots, return_inverse=True)
        by_slot, all_rows, cells, n = [], [np.empty(0, dtype=np.int64)], [], 0
        for slot in groups[groups >= 0].tolist():
            rows = np.flatnonzero(slots == slot)
            first, last = int(rows[0]), int(rows[-1])
            run = last - first + 1 == len(rows)
            by_slot.append(SlotTokens(slot=slot, rows=slice(first, last + 1) if run else torch.from_numpy(rows)))
            all_rows.append(rows)
            cells.append((slot, 0, n, n + len(rows)))
            n += len(rows)
        return cls(
            groups=groups,
            group_of=group_of,
            by_slot=tuple(by_slot),
            rows=np.concatenate(all_rows),
            cells=np.array(cells, dtype=np.int64).reshape(-1, 4),
        )


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    widths: Sequence[int],
    batch: BatchSlots,
) -> None:
    """``y[:, part] += x A^T B^T`` in place, for every part of a merged projection.

    ``y`` [T, sum(widths)], ``x`` [T, in]; ``lora_a`` [S, 1, r, in] and ``lora_b`` [S, 1, width, r] per part.
    """
    if looped(y.dtype):
        add_lora_rows(y, x, batch.rows, batch.cells, lora_a, lora_b)
        return
    for tokens in batch.by_slot:
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

"""Packed micro-batches as padded rows [b, s], and the way back. Padding exists only here (contract C10).

A causal mask is all that rows need: a sequence starts at position 0 of its row and padding
follows it, so no token ever attends to padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from areal_lora.data.collate import HOST, select
from areal_lora.data.packing import MicroPlan
from areal_lora.types import TrainBatch

PAD_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One rank's micro-batch. ``index`` are the positions in b*s of the packed tokens [t], in order."""

    micro: TrainBatch | None  # None: a micro-batch of padding, computed for the collectives only
    token_ids: Tensor  # [b, s] int64
    position_ids: Tensor  # [b, s] int64
    index: Tensor  # [t] int64
    sequences: tuple[int, ...]


def make_rows(batch: TrainBatch, plan: MicroPlan, dp_rank: int, device: torch.device) -> Rows:
    """This rank's rows of one micro-batch."""
    sequences = plan.rows[dp_rank]
    micro = select(batch, sequences) if sequences else None
    token_ids = torch.full((plan.n_rows, plan.width), PAD_ID, dtype=torch.int64, device=HOST)
    starts: list[Tensor] = []
    if micro is not None:
        bounds = micro.cu_seqlens.tolist()
        for row, (a, b) in enumerate(pairwise(bounds)):
            token_ids[row, : b - a] = micro.token_ids[a:b]
            starts.append(torch.arange(row * plan.width, row * plan.width + b - a, device=HOST))
    index = torch.cat(starts) if starts else torch.empty(0, dtype=torch.int64, device=HOST)
    position_ids = torch.arange(plan.width, device=HOST)[None].expand(plan.n_rows, -1)
    return Rows(
        micro=None if micro is None else to_device(micro, device),
        token_ids=token_ids.to(device),
        position_ids=position_ids.to(device),
        index=index.to(device),
        sequences=sequences,
    )


def to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    moved = {f.name: value.to(device) for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)}
    return replace(batch, **moved)


def causal_mask(width: int, device: torch.device) -> Tensor:
    """[1, 1, s, s] bool, True where attention is forbidden (Megatron's convention)."""
    return torch.triu(torch.ones(1, 1, width, width, dtype=torch.bool, device=device), 1)


def next_token_targets(token_ids: Tensor) -> Tensor:
    """[b, s]: the token that position i predicts; the last position of a row predicts padding."""
    return torch.cat([token_ids[:, 1:], torch.full_like(token_ids[:, :1], PAD_ID)], dim=1)


def packed_from_rows(values: Tensor, rows: Rows) -> Tensor:
    """Packed [t] from predictions [b, s], where entry i of a row speaks of token i + 1.

    Entry 0 of every sequence becomes 0: nothing predicts it.
    """
    shifted = torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)
    return shifted.reshape(-1)[rows.index]

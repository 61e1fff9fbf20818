"""A micro-batch as the model computes it: the tokens of its trees in one row, and the way back to sequences.

The model predicts every token of a tree once. A sequence reads the predictions of its tokens, so those of a shared
start count once for each of its sequences, in the loss as in the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from areal_lora.data.collate import runs, select
from areal_lora.data.packing import MicroPlan, Tree
from areal_lora.engine.layers.attention import AttentionPlan, Segment
from areal_lora.engine.layers.dropout import text_keys
from areal_lora.types import TrainBatch

PAD_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch:
    """One rank's micro-batch of n tokens in trees, padded to t, with p predictions.

    Prediction k is how likely ``targets[k]`` is after token ``sources[k]``. ``index`` [tokens of ``micro``] is each
    token's prediction; p for the first token of a sequence, which has none.
    """

    micro: TrainBatch | None  # None: a micro-batch of padding, computed for the collectives only
    sequences: tuple[int, ...]
    token_ids: Tensor  # [1, t] int64
    keys: Tensor  # [t] int64, see `dropout.text_keys`; 0 for padding
    attention: AttentionPlan
    sources: Tensor  # [p] int64
    targets: Tensor  # [p] int64
    index: Tensor  # int64


def pack(batch: TrainBatch, plan: MicroPlan, dp_rank: int, device: torch.device) -> PackedMicroBatch:
    """Lay out this data-parallel rank's trees of one micro-batch."""
    trees = plan.trees[dp_rank]
    sequences = tuple(i for tree in trees for i in tree.sequences)
    micro = select(batch, sequences) if sequences else None
    row, keys = np.full(plan.n_tokens, PAD_ID, dtype=np.int64), np.zeros(plan.n_tokens, dtype=np.int64)
    before = where = np.empty(0, dtype=np.int64)
    segments: list[Segment] = []
    if micro is not None:
        segments, origins, reads = _segments(trees, micro.cu_seqlens.tolist())
        start, own, shared_start, shared = np.array([(s.start, s.own, s.shared_start, s.shared) for s in segments]).T
        held = runs(np.array(origins), own)  # the token of ``micro`` that each token of the row is
        tokens = micro.token_ids.numpy()
        row[: len(held)] = tokens[held]
        keys[: len(held)] = text_keys(tokens, micro.cu_seqlens[:-1].numpy())[held]
        before = np.arange(-1, len(held) - 1)  # the token before each token of the row, -1 at a start
        before[start] = np.where(shared > 0, shared_start + shared - 1, -1)
        where = runs(*np.array(reads).T)  # the row's token of each token of the sequences
    sources, targets, number = _predictions(row, before)
    return PackedMicroBatch(
        micro=None if micro is None else to_device(micro, device),
        sequences=sequences,
        token_ids=torch.from_numpy(row)[None].to(device),
        keys=torch.from_numpy(keys).to(device),
        attention=AttentionPlan.of(segments, plan.n_tokens, device),
        sources=torch.from_numpy(sources).to(device),
        targets=torch.from_numpy(targets).to(device),
        index=torch.from_numpy(number[where]).to(device),
    )


def _segments(trees: Sequence[Tree], bounds: Sequence[int]) -> tuple[list[Segment], list[int], list[tuple[int, int]]]:
    """Start (if shared) and branches of each tree, one after the other, and where their tokens come from and go to.

    Sequence i of the trees, in order, has tokens ``bounds[i]:bounds[i + 1]``. The second list holds the first of them
    for each segment, the third what each sequence reads: (first token in the row, number) of shared start and branch.
    """
    segments: list[Segment] = []
    origins: list[int] = []
    reads: list[tuple[int, int]] = []
    at = number = 0
    for tree in trees:
        shared_start, n = at, tree.shared
        if n:
            segments.append(Segment(start=at, own=n))
            origins.append(bounds[number])
            at += n
        for _ in tree.sequences:
            own = bounds[number + 1] - bounds[number] - n
            segments.append(Segment(start=at, own=own, shared_start=shared_start, shared=n))
            origins.append(bounds[number] + n)
            reads += ((shared_start, n), (at, own))
            at, number = at + own, number + 1
    return segments, origins, reads


def _predictions(row: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources [p], targets [p], and the prediction of each token of the row (p where it has none)."""
    predicted = before >= 0
    sources = before[predicted]
    number = np.full(len(before), len(sources))
    number[predicted] = np.arange(len(sources))
    return sources, row[: len(before)][predicted], number


def to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    moved = {f.name: value.to(device) for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)}
    return replace(batch, **moved)


def to_sequences(values: Tensor, packed: PackedMicroBatch) -> Tensor:
    """Packed [tokens of ``micro``] from predictions [p]; entry 0 of every sequence is 0."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, packed.index)

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

from areal_lora.data.collate import select
from areal_lora.data.packing import MicroPlan, Tree
from areal_lora.engine.common.attention import AttentionPlan, Segment
from areal_lora.engine.dropout import text_keys
from areal_lora.types import TrainBatch

PAD_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One rank's micro-batch of n tokens in trees, padded to t, with p predictions.

    Prediction k says how likely ``targets[k]`` is after token ``sources[k]``. ``index`` [tokens of ``micro``] is each
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


def pack(batch: TrainBatch, plan: MicroPlan, dp_rank: int, device: torch.device) -> Packed:
    """Lay out this data-parallel rank's trees of one micro-batch."""
    trees = plan.trees[dp_rank]
    sequences = tuple(i for tree in trees for i in tree.sequences)
    tokens, bounds = batch.token_ids.numpy(), batch.cu_seqlens.tolist()
    row, keys = np.full(plan.n_tokens, PAD_ID, dtype=np.int64), np.zeros(plan.n_tokens, dtype=np.int64)
    segments: list[Segment] = []
    before: list[np.ndarray] = []  # the token before each token of the row, -1 at a start
    index: list[np.ndarray] = []  # the row's token of each token of the sequences
    at = 0
    for tree in trees:
        for segment, text, own_keys in _segments(tree, tokens, bounds, at):
            row[segment.begin : segment.begin + segment.own] = text
            keys[segment.begin : segment.begin + segment.own] = own_keys
            previous = np.arange(segment.begin - 1, segment.begin + segment.own - 1)
            previous[0] = segment.start + segment.shared - 1 if segment.shared else -1
            before.append(previous)
            segments.append(segment)
            at = segment.begin + segment.own
        first = segments[-len(tree.sequences) :]
        for s in first:
            index += [np.arange(s.start, s.start + s.shared), np.arange(s.begin, s.begin + s.own)]
    sources, targets, number = _predictions(row, np.concatenate(before) if before else np.empty(0, np.int64))
    where = number[np.concatenate(index)] if index else np.empty(0, np.int64)
    micro = select(batch, sequences) if sequences else None
    return Packed(
        micro=None if micro is None else to_device(micro, device),
        sequences=sequences,
        token_ids=torch.from_numpy(row)[None].to(device),
        keys=torch.from_numpy(keys).to(device),
        attention=AttentionPlan.of(segments, plan.n_tokens, device),
        sources=torch.from_numpy(sources).to(device),
        targets=torch.from_numpy(targets).to(device),
        index=torch.from_numpy(where).to(device),
    )


def _segments(
    tree: Tree, tokens: np.ndarray, bounds: Sequence[int], at: int
) -> list[tuple[Segment, np.ndarray, np.ndarray]]:
    """Start (if shared) and branches of ``tree`` from token ``at`` of the row, with their tokens and keys."""
    texts = [tokens[bounds[i] : bounds[i + 1]] for i in tree.sequences]
    keys = [text_keys(text) for text in texts]
    n = tree.shared
    found = [(Segment(begin=at, own=n), texts[0][:n], keys[0][:n])] if n else []
    start, at = at, at + n
    for text, key in zip(texts, keys, strict=True):
        found.append((Segment(begin=at, own=len(text) - n, start=start, shared=n), text[n:], key[n:]))
        at += len(text) - n
    return found


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


def to_sequences(values: Tensor, packed: Packed) -> Tensor:
    """Packed [tokens of ``micro``] from predictions [p]; entry 0 of every sequence is 0."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, packed.index)

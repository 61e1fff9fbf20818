"""Write an adapter into the slots of a worker as the receiver does."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.kernels import Marks
from areal_lora.weight_sync.layout import AdapterLayout, make_layout
from areal_lora.weight_sync.link.inbox import BucketBytes
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import KEYS

if TYPE_CHECKING:
    from areal_lora.engine.vllm_ext.worker.lora_install import StackedSlotWriter

Full = dict[str, np.ndarray]
"""Whole tensors by name, fp32."""


def layout_of(
    full: Full, s: AdapterSpec, dtype: str = "float32", aliases: dict[str, str] | None = None
) -> AdapterLayout:
    return make_layout(s, dtype, {0: [(n, t.shape) for n, t in full.items()]}, aliases or {})


def install(
    writer: StackedSlotWriter, slot: int, layout: AdapterLayout, full: Full, cuts: tuple[int, ...] = ()
) -> Marks:
    """As the receiver does it: in runs of tensors, each from memory of its own."""
    flat = torch.empty(layout.nbytes, dtype=torch.uint8)
    list(pack_of(layout, 0, {n: torch.from_numpy(t) for n, t in full.items()})(flat))
    (plan,) = writer.plan(layout)
    marks = layout.tables[0].marks(KEYS.multipliers)
    writer.prepare(slot, layout)
    tensors = layout.shards[0].tensors
    bounds = (0, *cuts, len(tensors))
    for first, last in itertools.pairwise(bounds):
        begin = tensors[first].offset
        end = tensors[last].offset if last < len(tensors) else layout.nbytes
        writer.write(plan, slot, BucketBytes(flat[begin:end].numpy().copy(), begin), first, last, marks)
    writer.flush(slot)
    return marks

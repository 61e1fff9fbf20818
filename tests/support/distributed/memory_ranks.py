"""What each rank of a test of micro-batches' memory does: passes on a real engine, with the living masks counted."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from areal_lora.engine.layers.attention import AttentionPlan, Segment
from tests.support.distributed.engine_ranks import Case, build, loss_fn, make_batch
from tests.support.distributed.operations_ranks import VOCABULARY

MICRO_BATCHES, SHARED, OWN = 8, 10, 30
BUDGET = SHARED + 2 * OWN
"""Tokens of a group of two answers after one prompt: a micro-batch, whose attention needs a mask."""


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    drawn = torch.randint(0, VOCABULARY, (MICRO_BATCHES, SHARED + 2 * OWN), generator=generator).tolist()
    return [row[:SHARED] + own for row in drawn for own in (row[SHARED:-OWN], row[-OWN:])]


def living_masks(path: str, case: Case) -> dict[str, list[int]]:
    """By kind of pass: micro-batches of which a mask is in memory, after each mask was made and after the pass."""
    engine, batch = build(path, case), make_batch(rows())
    masks: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []
    plan = AttentionPlan.of

    def planned(segments: Sequence[Segment], n_tokens: int, device: torch.device) -> AttentionPlan:
        made = plan(segments, n_tokens, device)
        (mask,) = (block.mask for block in made.blocks if block.mask is not None)
        masks.append(weakref.ref(mask))
        seen.append(sum(mask() is not None for mask in masks))
        return made

    found: dict[str, list[int]] = {}
    passes: dict[str, Any] = {
        "training": lambda: engine.forward_backward(batch, loss_fn, need_entropy=True),
        "scoring": lambda: engine.logprobs(batch, adapter="a"),
    }
    for kind, run in passes.items():
        seen.clear()
        with mock.patch.object(AttentionPlan, "of", planned):
            run()
        found[kind] = [*seen, sum(mask() is not None for mask in masks)]
    return found

"""What each rank of a test of micro-batches' memory does: passes on a real engine, living plans counted."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from areal_lora.engine.layers import attention
from areal_lora.engine.layers.attention import AttentionPlan, Segment
from tests.support.distributed.engine_ranks import Case, build, loss_fn, make_batch
from tests.support.distributed.operations_ranks import VOCABULARY

MICRO_BATCHES, SHARED, OWN = 8, 10, 30
BUDGET = SHARED + 2 * OWN
"""Tokens of a group of two answers after one prompt: a micro-batch."""


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    drawn = torch.randint(0, VOCABULARY, (MICRO_BATCHES, SHARED + 2 * OWN), generator=generator).tolist()
    return [row[:SHARED] + own for row in drawn for own in (row[SHARED:-OWN], row[-OWN:])]


def living_plans(path: str, case: Case) -> dict[str, list[int]]:
    """By kind of pass: micro-batches whose attention plan is in memory, after each plan was made and after the pass."""
    engine, batch = build(path, case), make_batch(rows())
    plans: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def planned(segments: Sequence[Segment], n_tokens: int, device: torch.device) -> AttentionPlan:
        made = AttentionPlan(segments, n_tokens, device)
        plans.append(weakref.ref(made.positions))
        seen.append(sum(plan() is not None for plan in plans))
        return made

    found: dict[str, list[int]] = {}
    passes: dict[str, Any] = {
        "training": lambda: engine.forward_backward(batch, loss_fn, need_entropy=True),
        "scoring": lambda: engine.logprobs(batch, adapter="a"),
    }
    for kind, run in passes.items():
        seen.clear()
        with mock.patch.object(attention, "AttentionPlan", planned):
            run()
        found[kind] = [*seen, sum(plan() is not None for plan in plans)]
    return found

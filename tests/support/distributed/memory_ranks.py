"""What each rank of a test of micro-batches' memory does: passes on a real engine, living plans and bytes counted."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from areal_lora.engine.layers import attention
from areal_lora.engine.layers.attention import AttentionPlan, Segment
from tests.support.distributed.engine_ranks import Case, build, loss_fn, make_batch
from tests.support.distributed.operations_ranks import VOCABULARY
from tests.support.engine.alive import Alive

MICRO_BATCHES, SHARED, OWN = 8, 20, 30
BUDGET = SHARED + 2 * OWN
"""Tokens of a group of two answers after one prompt: a micro-batch."""
RESULT_BYTES = 1024
"""More than a micro-batch's scores and sums have, less than any hidden states of it."""


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    drawn = torch.randint(0, VOCABULARY, (MICRO_BATCHES, SHARED + 2 * OWN), generator=generator).tolist()
    return [row[:SHARED] + own for row in drawn for own in (row[SHARED:-OWN], row[-OWN:])]


@dataclass(frozen=True, slots=True)
class Living:
    """In memory when each micro-batch's plan has been made, and after the pass."""

    plans: list[int]
    nbytes: list[int]


def living(path: str, case: Case) -> dict[str, Living]:
    """By kind of pass: the micro-batches with an attention plan, and the bytes of all tensors that the pass made."""
    engine, batch = build(path, case), make_batch(rows())
    plans: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []
    nbytes: list[int] = []

    def planned(segments: Sequence[Segment], *others: Any) -> AttentionPlan:
        made = AttentionPlan(segments, *others)
        plans.append(weakref.ref(made.positions))
        seen.append(sum(plan() is not None for plan in plans))
        nbytes.append(alive.now())
        return made

    found: dict[str, Living] = {}
    passes: dict[str, Any] = {
        "training": lambda: engine.forward_backward(batch, loss_fn, need_entropy=True),
        "scoring": lambda: engine.logprobs(batch, adapter="a"),
    }
    for kind, run in passes.items():
        seen.clear(), nbytes.clear()
        with mock.patch.object(attention, "AttentionPlan", planned), Alive() as alive:
            run()
        found[kind] = Living([*seen, sum(plan() is not None for plan in plans)], [*nbytes, alive.now()])
    return found

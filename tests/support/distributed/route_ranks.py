"""What each rank of a test of recorded routes does: pack micro-batches, choose as a model would, return the column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.engine.common.arena import ParallelLayout, ShardedModel, context_groups
from areal_lora.engine.common.micro_batches import RouteRecorder, of_stage, parts_of, plans_of, routed_layers
from areal_lora.engine.layers.attention import PackedMicroBatch, pack
from areal_lora.engine.layers.context import ContextGroup
from areal_lora.families.shape import ModelShape
from areal_lora.types import TrainBatch

BUDGET = 60


def choice(token_ids: Tensor, layers: list[int], shape: ModelShape) -> Tensor:
    """[t, L, K] of tokens in some of the layers with experts, as int64."""
    seeds = token_ids.long()[:, None, None] + 7 * torch.tensor(layers, dtype=torch.int64)[:, None]
    return (seeds + 3 * torch.arange(shape.experts_per_token)) % shape.experts


def compute(packed: PackedMicroBatch, layout: ParallelLayout, layers: list[int], shape: ModelShape) -> None:
    """Choose for this rank's part of the micro-batch's row; a stage without experts has no routes."""
    rows = packed.tokens.routes
    assert (rows is not None) == bool(layers)
    if rows is not None:
        assert (rows == -1).all()
        part = len(rows) // layout.tp
        first = layout.tp_rank(dist.get_rank()) * part
        rows[first : first + part] = choice(packed.token_ids[0, first : first + part], layers, shape).short()


def record(layouts: list[ParallelLayout], shape: ModelShape, batch: TrainBatch, minibatches: int) -> list[Any]:
    """By layout: the sequences that this rank needs, their routes in all layers, and the bytes that arrive.

    A micro-batch's choices come when the next ``pp - 1`` ones are packed, as with virtual stages.
    """
    rank, found, arrived = dist.get_rank(), [], list[int]()
    send = dist.batch_isend_irecv

    def counted(ops: list[dist.P2POp]) -> Any:
        arrived.extend(op.tensor.nbytes for op in ops if op.op is dist.irecv)
        return send(ops)

    dist.batch_isend_irecv = counted
    for layout in layouts:
        dp_rank, model, n = layout.dp_rank(rank), ShardedModel(shape=shape, layout=layout), batch.n_sequences
        groups = {first: dist.new_group([*range(first, first + layout.tp)]) for first in range(0, 4, layout.tp)}
        tp_group = groups[rank - layout.tp_rank(rank)]
        context = ContextGroup.join(context_groups(layout), rank)
        needed = parts_of(batch, minibatches, layout, BUDGET)
        held = torch.from_numpy(needed[dp_rank]) if rank else torch.ones(n, dtype=torch.bool)
        own_ids = batch.token_ids[held.repeat_interleave(batch.cu_seqlens.diff())]
        mine = replace(batch, token_ids=own_ids, held=held if rank else None)
        for name in ("rollout_logprobs", "versions"):
            mine = replace(mine, **{name: getattr(batch, name)[: len(own_ids)]})
        recorder = RouteRecorder(mine, needed, model, tp_group, context)
        layers = [layer for ends in routed_layers(model, rank) for layer in range(*ends)]
        plans, staged = plans_of(batch, layout, BUDGET), of_stage(recorder.batch, model, rank)
        waiting: list[PackedMicroBatch] = []
        batches: Iterator[PackedMicroBatch] = (
            pack(staged, plan, dp_rank, torch.device("cpu"), context) for plan in plans
        )
        arrived.clear()
        watched = recorder.watch(batches, plans)
        for _ in plans:  # a schedule that knows how many there are
            waiting.append(next(watched))
            if len(waiting) == layout.pp:
                compute(waiting.pop(0), layout, layers, shape)
        for packed in waiting:
            compute(packed, layout, layers, shape)
        routes = recorder.routes()
        tokens = torch.from_numpy(needed[dp_rank]).repeat_interleave(batch.cu_seqlens.diff())
        found.append((needed[dp_rank], (routes if rank else routes[tokens]).numpy(), np.array(sum(arrived))))
    return [tuple(np.array(x) for x in each) for each in found]

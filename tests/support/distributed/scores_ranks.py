"""What each rank of a test of delivered scores does: report those of its own sequences, and count what arrives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.common.micro_batches import gather_scores, parts_of, plans_of
from areal_lora.types import TrainBatch

BUDGET = 60


def deliver(layouts: list[ParallelLayout], batch: TrainBatch, minibatches: int) -> list[Any]:
    """By layout: the scores of this rank's part, of all, and the bytes that arrive for the part.

    The score of token t is t, and -1 where a rank that computes none reports one.
    """
    rank, found, arrived = dist.get_rank(), [], list[int]()
    exchange = dist.batch_isend_irecv

    def counted(ops: list[dist.P2POp]) -> Any:
        arrived.extend(op.tensor.nbytes for op in ops if op.op is dist.irecv)
        return exchange(ops)

    dist.batch_isend_irecv = counted
    for layout in layouts:
        plans, bounds = plans_of(batch, layout, BUDGET), batch.cu_seqlens.tolist()
        held = parts_of(batch, minibatches, layout, BUDGET)[layout.dp_rank(rank)]
        mine = replace(batch, held=torch.from_numpy(held) if rank else None)
        results = []
        for trees in (plan.trees[layout.dp_rank(rank)] for plan in plans):
            sequences = tuple(i for tree in trees for i in tree.sequences)
            tokens = [torch.arange(bounds[i], bounds[i + 1]) for i in sequences]
            values = torch.cat(tokens).float() if tokens else torch.empty(0)
            results.append((sequences, {}, values if rank in layout.reporting() else values * 0 - 1))
        arrived.clear()
        part = gather_scores(mine, plans, results, layout, whole=False)
        nbytes = sum(arrived)
        whole = gather_scores(mine, plans, results, layout, whole=True)
        found.append((held, part.numpy(), whole.numpy(), nbytes))
    return [tuple(np.array(x) for x in each) for each in found]

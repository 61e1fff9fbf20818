"""The experts that routers choose in one pass, as routes of a batch for later passes (`behaviour.router_replay: old`).

A rank has the choices of its layers for its part of a micro-batch's row. The ranks of that row complete it, once a
micro-batch. After the pass a data-parallel rank receives what another one has computed of its sequences: later passes
cut the batch into other micro-batches.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.data.collate import HOST, MicroPlan
from areal_lora.engine.common.arena import ShardedModel
from areal_lora.engine.common.micro_batches import computed_by, exchange, routed_layers
from areal_lora.engine.layers.attention import PackedMicroBatch
from areal_lora.engine.layers.context import ContextGroup
from areal_lora.platforms.collectives import all_gather_single
from areal_lora.types import TrainBatch


class RouteRecorder:
    """Of the sequences of ``batch`` that later passes ``needed`` [dp, N] on each data-parallel rank.

    ``tp_group`` are the ranks that divide the row of a micro-batch, of which each has its ``context`` part.
    """

    def __init__(
        self,
        batch: TrainBatch,
        needed: np.ndarray,
        model: ShardedModel,
        tp_group: dist.ProcessGroup | None,
        context: ContextGroup | None,
    ) -> None:
        self._layout, self._rank = model.layout, dist.get_rank()
        self._needed, self._tp_group, self._context = needed, tp_group, context
        self._layers = [*chain(*(range(*ends) for ends in routed_layers(model, self._rank)))]
        h, shape = batch.token_ids.numel(), model.shape
        nothing = torch.full((1, 1, 1), -1, dtype=torch.int16, device=HOST)
        self.batch = replace(batch, routes=nothing.expand(h, shape.moe_layers, shape.experts_per_token))
        """For the pass that records: routers choose everywhere."""
        lengths = batch.cu_seqlens.diff().numpy()
        held = np.ones(len(lengths), np.bool_) if batch.held is None else batch.held.numpy()
        ends = (lengths * held).cumsum()
        self._at = {int(i): slice(int(ends[i] - lengths[i]), int(ends[i])) for i in np.flatnonzero(held)}
        dtype = torch.uint8 if shape.experts <= 256 else torch.int16
        self._found = torch.zeros(h, len(self._layers), shape.experts_per_token, dtype=dtype, device=HOST)
        self._waiting, self._plans = deque[PackedMicroBatch](), list[MicroPlan]()

    def watch(self, batches: Iterator[PackedMicroBatch], plans: Sequence[MicroPlan]) -> Iterator[PackedMicroBatch]:
        """``batches`` of ``plans``; their routes are read when the rank has computed them, and not all at the end.

        Of virtual stages the first may compute the next micro-batch while the last ones of pp - 1 before lack theirs.
        """
        self._plans = list(plans)
        for packed in batches:
            self._waiting.append(packed)
            yield packed
            if len(self._waiting) >= self._layout.pp:
                self._collect(self._waiting.popleft())

    def routes(self) -> Tensor:
        """[H, L, K] int16: -1 in layers of other stages; undefined in sequences that are not needed. Collective."""
        while self._waiting:
            self._collect(self._waiting.popleft())
        step = self._layout.tp * self._layout.cp
        first = self._rank - self._layout.dp_rank(self._rank) * step
        computed = computed_by(self._plans, self.batch, self._layout)
        transfers = [
            (first + source * step, first + target * step, np.flatnonzero(own & wanted))
            for source, own in enumerate(computed)
            for target, wanted in enumerate(self._needed)
        ]
        exchange(self._found, self._at, transfers if self._layers else ())
        assert self.batch.routes is not None
        routes = torch.full(self.batch.routes.shape, -1, dtype=torch.int16, device=HOST)
        routes[:, self._layers] = self._found.short()
        return routes

    def _collect(self, packed: PackedMicroBatch) -> None:
        if not (packed.sequences and self._layers):
            return
        assert packed.tokens.routes is not None
        rows, tp = packed.tokens.routes.to(self._found.dtype), self._layout.tp
        if tp > 1:
            whole, parts = torch.empty_like(rows), rows.chunk(tp)  # bytes: NCCL knows no int16
            all_gather_single(whole.view(torch.uint8), parts[self._rank % tp].view(torch.uint8), group=self._tp_group)
            rows = whole
        if self._context is not None:
            rows = self._context.gather(rows.view(torch.uint8)).view(rows.dtype)
        found = rows.cpu().index_select(0, packed.rows)
        at = [self._at[i] for i in packed.sequences]
        for own, values in zip(at, found.split([own.stop - own.start for own in at]), strict=True):
            self._found[own] = values

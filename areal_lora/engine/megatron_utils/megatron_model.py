"""This rank's part of the model, run through Megatron's pipeline schedule as packed token trees [1, t].

`packed` explains why no result depends on the packing. Importing this file imports Megatron: the caller
must have applied `platforms.megatron_cpu` on a machine without GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.data.collate import HOST
from areal_lora.data.packing import find_trees, plan_microbatches
from areal_lora.engine.base import LossFn
from areal_lora.engine.megatron_utils.adapter_memory import AdapterMemory
from areal_lora.engine.megatron_utils.arena import Range, ShardedModel
from areal_lora.engine.megatron_utils.base_weights import load_base
from areal_lora.engine.megatron_utils.initialize import initialize_parallel
from areal_lora.engine.megatron_utils.lora import attach, set_enabled
from areal_lora.engine.megatron_utils.model import build_model
from areal_lora.engine.megatron_utils.optimizer import AdapterOptimizer
from areal_lora.engine.megatron_utils.packed import Packed, pack
from areal_lora.engine.megatron_utils.schedule import Result, run_schedule
from areal_lora.types import TrainBatch


class MegatronModel:
    """The frozen base on this rank, and the adapter attached to it. Every call is collective over all ranks."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        sharded: ShardedModel,
        hf: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        """Join torch.distributed unless the caller has, build the model and load the base."""
        tp_group, etp_group = initialize_parallel(trainer, device)
        self.groups = {Range.DENSE_SPLIT: tp_group, Range.EXPERT_SPLIT: etp_group}
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._trainer, self._layout, self._device = trainer, sharded.layout, device
        self.module: nn.Module
        self.module, self._packing = build_model(model, trainer, sharded.layout, hf, device)
        load_base(self.module, model.folder, sharded, self.rank)

    def attach(self, memory: AdapterMemory, optimizer: OptimizerConfig) -> AdapterOptimizer:
        """Freeze the base and wrap its target layers with the adapter in ``memory``."""
        self.module = attach(self.module, memory)
        return AdapterOptimizer(optimizer, memory)

    def logprobs(self, batch: TrainBatch, temperature: float, *, adapted: bool) -> Tensor:
        """[T] of the whole batch on every rank, with the adapter on or off; see `TrainEngine.logprobs`."""
        set_enabled(self.module, adapted)
        try:
            with torch.no_grad():
                results = self._run(batch, None, temperature)
        finally:
            set_enabled(self.module, True)
        packed = torch.zeros(batch.n_tokens, device=HOST)
        bounds = batch.cu_seqlens.tolist()
        for packed_rows, values in results:
            assert isinstance(values, Tensor)
            at = 0
            for sequence in packed_rows.sequences:
                a, b = bounds[sequence], bounds[sequence + 1]
                packed[a:b] = values[at : at + b - a].cpu()
                at += b - a
        # One data-parallel rank of the last stage (and its tensor-parallel copies) computed each token.
        if self.rank not in self._reporting_ranks():
            packed.zero_()
        dist.all_reduce(packed)
        return packed

    def forward_backward(
        self, batch: TrainBatch, loss_fn: LossFn, temperature: float, *, need_entropy: bool
    ) -> dict[str, float]:
        """Add to the gradients; returns the sums over all ranks. See `TrainEngine.forward_backward`."""
        sums: Counter[str] = Counter()
        for _, stats in self._run(batch, loss_fn, temperature, need_entropy=need_entropy):
            assert isinstance(stats, Mapping)
            sums.update({name: float(value) for name, value in stats.items()})
        return self._sum_over_ranks(sums)

    def _run(
        self, batch: TrainBatch, loss_fn: LossFn | None, temperature: float, *, need_entropy: bool = False
    ) -> list[Result]:
        """Run every micro-batch through the schedule; the results on the last pipeline stage, else nothing."""
        layout = self._layout
        bounds = batch.cu_seqlens.tolist()
        trees = find_trees(batch.token_ids.numpy(), bounds, batch.group_ids.tolist())
        plans = plan_microbatches(
            trees,
            [b - a for a, b in pairwise(bounds)],
            dp=layout.dp,
            token_budget=self._trainer.max_tokens_per_microbatch,
            multiple=layout.tp,
            uniform=layout.pp > 1,
        )
        dp_rank = layout.dp_rank(self.rank)

        def micro_batches() -> Iterator[Packed]:
            for plan in plans:
                yield pack(batch, plan, dp_rank, self._device)

        return run_schedule(
            self.module,
            self._packing,
            micro_batches(),
            plans,
            loss_fn,
            temperature=temperature,
            need_entropy=need_entropy,
        )

    def _reporting_ranks(self) -> set[int]:
        """One rank per data-parallel part that computes the loss: last stage, tensor-parallel rank 0."""
        first = self._layout.first_rank_of_last_stage()
        return {r for r in range(first, self.world_size) if self._layout.tp_rank(r) == 0}

    def _sum_over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add up the sums of the reporting ranks. The first rank of the last stage broadcasts the names."""
        source = self._layout.first_rank_of_last_stage()
        names = _broadcast_names(sorted(sums), source, self.rank)
        reports = self.rank in self._reporting_ranks()
        values = torch.tensor([sums.get(n, 0.0) if reports else 0.0 for n in names], dtype=torch.float64)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))


def _broadcast_names(names: list[str], source: int, rank: int) -> list[str]:
    text = "\n".join(names).encode()
    size = torch.tensor([len(text)], dtype=torch.int64)
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if rank == source:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(data, source)
    received: bytes = data.numpy().tobytes()
    return received.decode().split("\n")

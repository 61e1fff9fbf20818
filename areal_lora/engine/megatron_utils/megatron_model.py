"""This rank's part of the model, run through Megatron's pipeline schedule as packed token trees [1, t].

`packed` explains why no result depends on the packing. Importing this file imports Megatron: the caller
must have applied `engine.megatron_utils.cpu_patches` on a machine without GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import Range, ShardedModel
from areal_lora.engine.common.micro_batches import Result, plans_of, sum_over_ranks, whole_scores
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.common.optimizer import GradientClass
from areal_lora.engine.common.output import Readout
from areal_lora.engine.layers.dropout import Dropout
from areal_lora.engine.layers.packed import PackedMicroBatch, pack
from areal_lora.engine.layers.residents import ActiveAdapter
from areal_lora.engine.megatron_utils.base_weights import load_base
from areal_lora.engine.megatron_utils.gradients import classify
from areal_lora.engine.megatron_utils.initialize import initialize_parallel
from areal_lora.engine.megatron_utils.lora import attach, detach, take_output
from areal_lora.engine.megatron_utils.model import build_model
from areal_lora.engine.megatron_utils.schedule import run_schedule
from areal_lora.types import TrainBatch


class MegatronModel:
    """The frozen base on this rank, and the adapters attached to it.

    Every call but `detach` is collective over all ranks.
    """

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
        self._active = ActiveAdapter()
        self.module: nn.Module
        self.module, self._packing = build_model(model, trainer, sharded.layout, hf, device)
        load_base(self.module, ModelFolder.of(model), sharded, self.rank)
        self._output = take_output(self.module, self._active)
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        self._packing.follow(self.module, self._active)

    def attach(self, memory: AdapterMemory) -> list[GradientClass]:
        """Make the adapter in ``memory`` resident."""
        attach(self.module, memory, self._active)
        if head := memory.value_head():
            assert self._output is not None, "a value head is on the last stage"
            self._output.heads[memory.spec.name] = head
        return classify(memory)

    def detach(self, name: str) -> None:
        """Forget a resident adapter (not collective)."""
        detach(self.module, name)
        if self._output:
            self._output.heads.pop(name, None)

    def score(self, batch: TrainBatch, adapter: str | None, readout: Readout) -> Tensor:
        """[T] of the whole batch on every rank under ``adapter``; see `Compute.score`."""
        with torch.no_grad(), self._active.using(adapter):
            results = self._run(batch, None, readout)
        # One data-parallel rank of the last stage (and its tensor-parallel copies) computed each token.
        return whole_scores(batch, results, reports=self.rank in self._reporting_ranks())

    def forward_backward(
        self,
        batch: TrainBatch,
        adapter: str,
        loss_fn: LossFn,
        readout: Readout,
        *,
        need_entropy: bool,
        dropout: Dropout | None,
        scores: Tensor | None,
    ) -> dict[str, float]:
        """Add to the adapter's gradients; returns the sums over all ranks. See `TrainEngine.forward_backward`."""
        sums: Counter[str] = Counter()
        with self._active.using(adapter, dropout):
            results = self._run(batch, loss_fn, readout, need_entropy=need_entropy)
        for _, stats, _ in results:
            sums.update({name: float(value) for name, value in stats.items()})
        if scores is not None:
            scores.copy_(whole_scores(batch, results, reports=self.rank in self._reporting_ranks()))
        return sum_over_ranks(sums, self._reporting_ranks())

    def _run(
        self, batch: TrainBatch, loss_fn: LossFn | None, readout: Readout, *, need_entropy: bool = False
    ) -> list[Result]:
        """Run every micro-batch through the schedule; the results on the last pipeline stage, else nothing."""
        plans = plans_of(batch, self._layout, self._trainer.max_tokens_per_microbatch)
        dp_rank = self._layout.dp_rank(self.rank)

        def micro_batches() -> Iterator[PackedMicroBatch]:
            for plan in plans:
                yield pack(batch, plan, dp_rank, self._device)

        return run_schedule(
            self.module, self._packing, micro_batches(), plans, loss_fn, readout=readout, need_entropy=need_entropy
        )

    def _reporting_ranks(self) -> set[int]:
        """One rank per data-parallel part that computes the loss: last stage, tensor-parallel rank 0."""
        first = self._layout.first_rank_of_last_stage()
        return {r for r in range(first, self.world_size) if self._layout.tp_rank(r) == 0}

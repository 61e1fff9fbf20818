"""This rank's part of the model, run through Megatron's pipeline schedule as packed token trees [1, t].

`packed` explains why no result depends on the packing. Importing this file imports Megatron: the caller
must have applied `engine.megatron_utils.cpu_patches` on a machine without GPU.

Weights of the frozen base: from a Hugging Face folder straight into one rank's Megatron parameters.

Every rank reads the slices that it holds: no weight travels between ranks, and every layout is read the same
way. Both kinds of Megatron layers are supported: plain torch and Transformer Engine, whose linear layers contain
the preceding norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.data.collate import MicroPlan
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.adapter_memory import AdapterMemory, GradientClass
from areal_lora.engine.common.arena import Range, ShardedModel
from areal_lora.engine.common.micro_batches import Readout, Result, finish, plans_of, sum_over_ranks, whole_scores
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.layers.attention import PackedMicroBatch, pack
from areal_lora.engine.layers.expert_mlp import ActiveAdapter, Dropout
from areal_lora.engine.megatron_utils.base_weights import load_base
from areal_lora.engine.megatron_utils.core_attention import Packing
from areal_lora.engine.megatron_utils.lora import attach, detach, take_output
from areal_lora.engine.megatron_utils.model import build_model, initialize_parallel
from areal_lora.types import ExpertLayout, TrainBatch


def run_schedule(
    model: nn.Module,
    packing: Packing,
    batches: Iterator[PackedMicroBatch],
    plans: Sequence[MicroPlan],
    loss_fn: LossFn | None,
    *,
    readout: Readout,
    need_entropy: bool,
) -> list[Result]:
    """Run every micro-batch; the results on the last stage, elsewhere nothing.

    With a ``loss_fn`` gradients of its plain sums are accumulated; without one nothing is differentiated.
    """
    results: list[Result] = []
    # One forward, one backward: the last stage has differentiated a micro-batch before it computes the next one, each
    # stage before it has one more in progress.
    ahead = parallel_state.get_pipeline_model_parallel_world_size() - parallel_state.get_pipeline_model_parallel_rank()
    in_progress = 0 if loss_fn is None else ahead - 1

    def forward_step(iterator: Iterator[PackedMicroBatch], module: nn.Module) -> tuple[Tensor, Any]:
        packing.keep(in_progress)
        packed = next(iterator)
        # Positions are part of the attention plan; the model's embedding takes none.
        predictions = module(packed.token_ids, None, packing.add(packed.attention, packed.keys))

        def judge(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            group = parallel_state.get_tensor_model_parallel_group()
            loss, sums, scores = finish(
                packed, output[0], packed.sources, loss_fn, readout, need_entropy=need_entropy, group=group
            )
            results.append((packed.sequences, sums, scores))
            return loss, torch.ones((), dtype=torch.int32, device=output.device), {}

        return predictions, judge

    try:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=len(plans),
            seq_length=plans[0].n_tokens,
            micro_batch_size=1,
            forward_only=loss_fn is None,
        )
    finally:
        packing.keep(0)
    return results


def classify(memory: AdapterMemory) -> list[GradientClass]:
    """The groups over which the gradients of each range of a rank's memory must be summed.

    Split tensors are whole after the sum over their replicas, replicated ones need their tensor-parallel
    ranks' parts as well (see `lora`). The gradient of what all experts share covers this rank's experts only: its
    replicas include the expert-parallel ranks. With ``shared_outer`` these are the whole matrices, and the split ones
    are each expert's own. Each element counts once in the norm.
    """
    layout, rank = memory.model.layout, memory.rank
    dense = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
    experts = [parallel_state.get_expert_data_parallel_group()]
    first_dense, first_expert = layout.dp_rank(rank) == 0, layout.edp_rank(rank) == 0
    every = [*experts, parallel_state.get_expert_model_parallel_group()]
    first_of_all = first_expert and layout.ep_rank(rank) == 0
    shared = memory.spec.expert_layout
    split, first_split = (every, first_of_all) if shared is ExpertLayout.SHARED else (experts, first_expert)
    whole, first_whole = (experts, first_expert) if shared is ExpertLayout.PER_EXPERT else (every, first_of_all)
    tp, etp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    rows = (
        (Range.DENSE_SPLIT, dense, first_dense),
        (Range.DENSE_WHOLE, [tp, *dense], first_dense and layout.tp_rank(rank) == 0),
        (Range.EXPERT_SPLIT, split, first_split),
        (Range.EXPERT_WHOLE, [etp, *whole], first_whole and layout.etp_rank(rank) == 0),
    )
    classes = []
    for part, groups, counted in rows:
        start, end = memory.arena.extent(part)
        if end > start:
            needed = [group for group in groups if dist.get_world_size(group) > 1]
            classes.append(GradientClass(start=start, end=end, groups=needed, counted=counted))
    return classes


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
